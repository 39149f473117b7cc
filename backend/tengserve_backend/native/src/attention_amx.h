// Attention of up to 16 query rows by the matrix unit, for bfloat16 with key_dim a multiple of 32 and value_dim of
// 16. Weights are rounded to bfloat16 before they meet the values. One row and sixteen take the same way, so a row
// has the same bits in any tile.
#pragma once

#include "amx.h"
#include "attention_kernel.h"

namespace tengserve {
namespace {

constexpr int64_t kAmxDims = 32;  // dimensions that one tile of keys has: 16 pairs
constexpr int64_t kAmxKeys = 32;  // keys that one tile of values has, likewise: two blocks
constexpr int kAmxBlocks = 4;     // blocks whose scores are summed at once

// Tiles 0 to 3 are sums, 4 the rows' factor (query or weights), 5 and 6 keys or values.
inline TileShapes attention_shapes(int rows) {
  TileShapes shapes;
  for (int tile = 0; tile < 5; ++tile) shapes.set(tile, rows, kTileBytes);
  shapes.set(5, kTileHeight, kTileBytes);
  shapes.set(6, kTileHeight, kTileBytes);
  return shapes;
}

inline void pack_query_amx(const AttentionTile<Bf16>& tile) {
  Bf16* packed = reinterpret_cast<Bf16*>(tile.packed);
  for (int r = 0; r < tile.rows; ++r) {
    std::memcpy(packed + r * tile.key_dim, tile.query[r], tile.key_dim * sizeof(Bf16));
  }
}

// Raw scores of kBlocks blocks from `block` on, into `scores` [rows][kPartKeys].
template <int kBlocks>
inline void score_blocks_amx(const AttentionTile<Bf16>& tile, int64_t block, int64_t end_block, float* scores) {
  const Bf16* query = reinterpret_cast<const Bf16*>(tile.packed);
  const int64_t query_bytes = tile.key_dim * sizeof(Bf16);
  const Bf16 *keys[kBlocks], *next[kBlocks];
  for (int b = 0; b < kBlocks; ++b) {
    const int64_t following = block + kBlocks + b < end_block ? block + kBlocks + b : block + b;
    keys[b] = tile.keys + tile.blocks[block + b] * tile.keys_a_block;
    next[b] = tile.keys + tile.blocks[following] * tile.keys_a_block;
  }
  _tile_zero(0);
  if constexpr (kBlocks > 1) _tile_zero(1);
  if constexpr (kBlocks > 2) _tile_zero(2);
  if constexpr (kBlocks > 3) _tile_zero(3);
  for (int64_t d = 0; d < tile.key_dim; d += kAmxDims) {
    for (int b = 0; b < kBlocks; ++b) {
      for (int64_t line = 0; line < kAmxDims * kBlockSize; line += 32) prefetch(next[b] + d * kBlockSize + line);
    }
    _tile_loadd(4, query + d, query_bytes);
    _tile_loadd(5, keys[0] + d * kBlockSize, kTileBytes);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (kBlocks > 1) {
      _tile_loadd(6, keys[1] + d * kBlockSize, kTileBytes);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (kBlocks > 2) {
      _tile_loadd(5, keys[2] + d * kBlockSize, kTileBytes);
      _tile_dpbf16ps(2, 4, 5);
    }
    if constexpr (kBlocks > 3) {
      _tile_loadd(6, keys[3] + d * kBlockSize, kTileBytes);
      _tile_dpbf16ps(3, 4, 6);
    }
  }
  constexpr int64_t kScoreBytes = kPartKeys * sizeof(float);
  _tile_stored(0, scores, kScoreBytes);
  if constexpr (kBlocks > 1) _tile_stored(1, scores + kBlockSize, kScoreBytes);
  if constexpr (kBlocks > 2) _tile_stored(2, scores + 2 * kBlockSize, kScoreBytes);
  if constexpr (kBlocks > 3) _tile_stored(3, scores + 3 * kBlockSize, kScoreBytes);
}

// Values of the 32 keys from `start` on as the unit wants them, [keys / 2][columns][2]; zeros for keys outside
// [begin, end), whose slots may hold anything.
inline void pair_values(const AttentionTile<Bf16>& tile, int64_t start, int64_t begin, int64_t end, int64_t column0,
                        int64_t columns, Bf16* paired) {
  for (int64_t key = 0; key < kAmxKeys; key += 2) {
    const int64_t position = start + key;
    const bool even = position >= begin && position < end, odd = position + 1 >= begin && position + 1 < end;
    const Bf16* row = nullptr;
    if (even || odd) {
      row = tile.values + tile.blocks[position / kBlockSize] * tile.values_a_block +
            position % kBlockSize * tile.value_dim + column0;
    }
    for (int64_t c = 0; c < columns; c += kLanes) {
      __m512i pair = _mm512_setzero_si512();
      if (even) {
        pair = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + c)));
      }
      if (odd) {
        const Bf16* second = row + tile.value_dim + c;
        pair = _mm512_or_si512(pair, _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(
                                                           reinterpret_cast<const __m256i*>(second))),
                                                       16));
      }
      _mm512_storeu_si512(paired + key * columns + 2 * c, pair);
    }
  }
}

// Weighted values of kTiles times 16 columns from column0 on. Groups of 32 keys begin at multiples of 32, whatever
// the tile.
template <int kTiles>
inline void weighted_values_amx(const AttentionTile<Bf16>& tile, int64_t begin, int64_t end, const Bf16* weights,
                                int64_t column0, AttentionSums& sums) {
  constexpr int64_t kColumns = kTiles * kLanes, kPairBytes = 2 * kColumns * sizeof(Bf16);
  alignas(64) Bf16 paired[kAmxKeys * kColumns];
  _tile_zero(0);
  if constexpr (kTiles > 1) _tile_zero(1);
  if constexpr (kTiles > 2) _tile_zero(2);
  if constexpr (kTiles > 3) _tile_zero(3);
  for (int64_t start = begin / kAmxKeys * kAmxKeys; start < end; start += kAmxKeys) {
    pair_values(tile, start, begin, end, column0, kColumns, paired);
    written_for_tiles();
    _tile_loadd(4, weights + start % kPartKeys, kPartKeys * sizeof(Bf16));
    _tile_loadd(5, paired, kPairBytes);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (kTiles > 1) {
      _tile_loadd(6, paired + 2 * kLanes, kPairBytes);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (kTiles > 2) {
      _tile_loadd(5, paired + 4 * kLanes, kPairBytes);
      _tile_dpbf16ps(2, 4, 5);
    }
    if constexpr (kTiles > 3) {
      _tile_loadd(6, paired + 6 * kLanes, kPairBytes);
      _tile_dpbf16ps(3, 4, 6);
    }
  }
  float* values = sums.values + column0;
  const int64_t value_bytes = tile.value_dim * sizeof(float);
  _tile_stored(0, values, value_bytes);
  if constexpr (kTiles > 1) _tile_stored(1, values + kLanes, value_bytes);
  if constexpr (kTiles > 2) _tile_stored(2, values + 2 * kLanes, value_bytes);
  if constexpr (kTiles > 3) _tile_stored(3, values + 3 * kLanes, value_bytes);
}

inline void attend_amx(const AttentionTile<Bf16>& tile, int64_t begin, int64_t end, AttentionSums sums) {
  const int64_t first_block = begin / kBlockSize, end_block = (end + kBlockSize - 1) / kBlockSize;
  // By the position in the part, so that groups of keys are the same in every tile.
  const int64_t part = begin / kPartKeys * kPartKeys;
  alignas(64) float scores[kTileHeight * kPartKeys];
  alignas(64) Bf16 weights[kTileHeight * kPartKeys];
  const TilesInUse in_use(attention_shapes(tile.rows));

  int64_t block = first_block;
  const auto at = [&](int64_t b) { return scores + b * kBlockSize - part; };
  for (; block + kAmxBlocks <= end_block; block += kAmxBlocks) {
    score_blocks_amx<kAmxBlocks>(tile, block, end_block, at(block));
  }
  for (; block < end_block; ++block) score_blocks_amx<1>(tile, block, end_block, at(block));

  const int64_t from = first_block * kBlockSize - part, to = end_block * kBlockSize - part;
  for (int r = 0; r < tile.rows; ++r) {
    float* row = scores + r * kPartKeys;
    Vec largest = broadcast(-kInfinity);
    for (int64_t b = first_block; b < end_block; ++b) {
      const Vec x = masked_scores(tile, load(row + b * kBlockSize - part), r, b);
      largest = max(largest, x);
      store(row + b * kBlockSize - part, x);
    }
    // Whole groups of keys: zeros outside the blocks.
    Bf16* out = weights + r * kPartKeys;
    for (int64_t c = from / kAmxKeys * kAmxKeys; c < from; c += kLanes) store(out + c, zeros());
    for (int64_t c = to; c % kAmxKeys; c += kLanes) store(out + c, zeros());
    weigh_row(tile, r, begin, end, largest, row + from, to - from, out + from, sums);
  }

  int64_t column = 0;
  for (; column + 4 * kLanes <= tile.value_dim; column += 4 * kLanes) {
    weighted_values_amx<4>(tile, begin, end, weights, column, sums);
  }
  for (; column < tile.value_dim; column += kLanes) {
    weighted_values_amx<1>(tile, begin, end, weights, column, sums);
  }
}

}  // namespace
}  // namespace tengserve
