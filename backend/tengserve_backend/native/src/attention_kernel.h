// Attention of one tile of query rows over part of its keys, see kernels.h. Two passes a part: all scores, which stay
// in the first-level cache, then the weighted values.
#pragma once

#include "kernels.h"

namespace tengserve {
namespace {

// A hint only: it cannot fault, whatever the address.
inline void prefetch(const void* p) {
  __builtin_prefetch(p);
}

// The query as `score_blocks` walks it: by dimension, then by row.
inline void pack_query(const AttentionTile<float>& tile) {
  for (int r = 0; r < tile.rows; ++r) {
    for (int64_t d = 0; d < tile.key_dim; ++d) tile.packed[d * tile.rows + r] = tile.query[r][d];
  }
}

inline void pack_query(const AttentionTile<Bf16>& tile) {
#ifdef __AVX512BF16__
  for (int r = 0; r < tile.rows; ++r) {
    // A pair of dimensions in one 32-bit word, as dot_pairs takes it; an odd last one as a float32.
    const int64_t pairs = tile.key_dim / 2;
    for (int64_t p = 0; p < pairs; ++p) std::memcpy(&tile.packed[p * tile.rows + r], tile.query[r] + 2 * p, 4);
    if (tile.key_dim % 2) tile.packed[pairs * tile.rows + r] = to_float(tile.query[r][tile.key_dim - 1]);
  }
#else
  for (int r = 0; r < tile.rows; ++r) {
    for (int64_t d = 0; d < tile.key_dim; ++d) tile.packed[d * tile.rows + r] = to_float(tile.query[r][d]);
  }
#endif
}

// Scores of R rows against kBlocks blocks. `next` are the blocks after these: their lines are fetched meanwhile.
template <int R, int kBlocks>
inline void score_blocks(const float* const* blocks, const float* const* next, const float* query, int64_t key_dim,
                         Vec (&scores)[kBlocks][R]) {
  for (int64_t d = 0; d < key_dim; ++d) {
    Vec keys[kBlocks];
    for (int b = 0; b < kBlocks; ++b) {
      keys[b] = load(blocks[b] + d * kBlockSize);
      prefetch(next[b] + d * kBlockSize);
    }
    for (int r = 0; r < R; ++r) {
      const Vec q = broadcast(query[d * R + r]);
      for (int b = 0; b < kBlocks; ++b) scores[b][r] = fma(q, keys[b], scores[b][r]);
    }
  }
}

template <int R, int kBlocks>
inline void score_blocks(const Bf16* const* blocks, const Bf16* const* next, const float* query, int64_t key_dim,
                         Vec (&scores)[kBlocks][R]) {
  const int64_t pairs = key_dim / 2;
  for (int64_t p = 0; p < pairs; ++p) {
    for (int b = 0; b < kBlocks; ++b) prefetch(next[b] + p * 2 * kBlockSize);
#ifdef __AVX512BF16__
    for (int r = 0; r < R; ++r) {
      uint32_t pair;
      std::memcpy(&pair, &query[p * R + r], sizeof pair);
      for (int b = 0; b < kBlocks; ++b) {
        scores[b][r] = dot_pairs(scores[b][r], blocks[b] + p * 2 * kBlockSize, pair);
      }
    }
#else
    for (int b = 0; b < kBlocks; ++b) {
      Vec even, odd;
      load_pairs(blocks[b] + p * 2 * kBlockSize, even, odd);
      for (int r = 0; r < R; ++r) {
        scores[b][r] = fma(broadcast(query[2 * p * R + r]), even, scores[b][r]);
        scores[b][r] = fma(broadcast(query[(2 * p + 1) * R + r]), odd, scores[b][r]);
      }
    }
#endif
  }
  if (key_dim % 2) {
#ifdef __AVX512BF16__
    const float* last = query + pairs * R;
#else
    const float* last = query + (key_dim - 1) * R;
#endif
    for (int b = 0; b < kBlocks; ++b) {
      const Vec keys = load(blocks[b] + (key_dim - 1) * kBlockSize);
      for (int r = 0; r < R; ++r) scores[b][r] = fma(broadcast(last[r]), keys, scores[b][r]);
    }
  }
}

// A row's scores of a block, scaled and capped; minus infinity where the row does not see the key.
template <typename T>
inline Vec masked_scores(const AttentionTile<T>& tile, Vec sums, int r, int64_t block) {
  Vec x = sums * broadcast(tile.scale);
  if (tile.softcap != 0.0f) x = tanh(x / broadcast(tile.softcap)) * broadcast(tile.softcap);
  const int64_t start = block * kBlockSize;
  const int64_t from = tile.first[r] - start, to = tile.last[r] + 1 - start;
  if (from > 0 || to < kBlockSize) {
    x = within(x, from < 0 ? 0 : from > kBlockSize ? kBlockSize : from, to < 0 ? 0 : to > kBlockSize ? kBlockSize : to,
               broadcast(-kInfinity));
  }
  return x;
}

// A row's scores of a part become weights relative to the largest of them, and their sum. A row that sees nothing of
// the part has weights of zero.
template <typename T, typename W>
inline void weigh_row(const AttentionTile<T>& tile, int r, int64_t begin, int64_t end, Vec largest, const float* scores,
                      int64_t columns, W* weights, AttentionSums& sums) {
  const bool sees = tile.first[r] < end && tile.last[r] >= begin;
  sums.largest[r] = largest_lane(largest);
  const Vec top = broadcast(sums.largest[r]);
  Vec total = zeros();
  for (int64_t c = 0; c < columns; c += kLanes) {
    const Vec weight = sees ? exp_or_zero(load(scores + c) - top) : zeros();
    total = total + weight;
    store(weights + c, weight);
  }
  sums.weights[r] = sees ? sum_of_lanes(total) : 0.0f;
}

// One part of a tile: its scores and which blocks they belong to.
template <typename T, int R>
struct Part {
  const AttentionTile<T>& tile;
  int64_t begin, end;              // positions that some row may see
  int64_t first_block, end_block;  // blocks of these
  alignas(64) float scores[R][kPartKeys];  // from first_block's first key on
  Vec largest[R];

  // Leaves the scores as they are: `score` writes all that is read.
  Part(const AttentionTile<T>& of, int64_t from, int64_t to)
      : tile(of), begin(from), end(to), first_block(from / kBlockSize), end_block((to + kBlockSize - 1) / kBlockSize) {
    for (int r = 0; r < R; ++r) largest[r] = broadcast(-kInfinity);
  }

  int64_t column(int64_t block) const { return (block - first_block) * kBlockSize; }

  template <int kBlocks>
  void score(int64_t block) {
    const T *keys[kBlocks], *next[kBlocks];
    for (int b = 0; b < kBlocks; ++b) {
      const int64_t following = block + kBlocks + b < end_block ? block + kBlocks + b : block + b;
      keys[b] = tile.keys + tile.blocks[block + b] * tile.keys_a_block;
      next[b] = tile.keys + tile.blocks[following] * tile.keys_a_block;
    }
    Vec sums[kBlocks][R];
    for (int b = 0; b < kBlocks; ++b) {
      for (int r = 0; r < R; ++r) sums[b][r] = zeros();
    }
    score_blocks<R, kBlocks>(keys, next, tile.packed, tile.key_dim, sums);
    for (int b = 0; b < kBlocks; ++b) {
      for (int r = 0; r < R; ++r) finish_scores(sums[b][r], r, block + b);
    }
  }

  void finish_scores(Vec sums, int r, int64_t block) {
    const Vec x = masked_scores(tile, sums, r, block);
    largest[r] = max(largest[r], x);
    store(&scores[r][column(block)], x);
  }

  void weigh(AttentionSums& sums) {
    for (int r = 0; r < R; ++r) {
      weigh_row(tile, r, begin, end, largest[r], scores[r], column(end_block), scores[r], sums);
    }
  }

  // Weighted values of kVecs vectors of columns from `column0` on; of the last only `width` columns exist.
  template <int kVecs>
  void weighted_values(int64_t column0, int width, AttentionSums& sums) const {
    Vec out[R][kVecs];
    for (int r = 0; r < R; ++r) {
      for (int c = 0; c < kVecs; ++c) out[r][c] = zeros();
    }
    for (int64_t block = first_block; block < end_block; ++block) {
      const int64_t start = block * kBlockSize;
      // Slots that no row sees may hold anything, NaN included, and 0 * NaN is no 0.
      const int64_t from = begin > start ? begin - start : 0;
      const int64_t to = end < start + kBlockSize ? end - start : kBlockSize;
      const T* values = tile.values + tile.blocks[block] * tile.values_a_block + column0;
      const int64_t following = block + 1 < end_block ? block + 1 : block;
      const T* next = tile.values + tile.blocks[following] * tile.values_a_block + column0;
      const float* weights = &scores[0][column(block)];
      for (int64_t j = from; j < to; ++j) {
        const T* row = values + j * tile.value_dim;
        Vec v[kVecs];
        for (int c = 0; c < kVecs; ++c) {
          v[c] = kVecs == 1 && width < kLanes ? load_first(row, width) : load(row + c * kLanes);
        }
        // One hint a cache line of the row.
        for (int c = 0; c < kVecs; c += 64 / static_cast<int>(kLanes * sizeof(T))) {
          prefetch(next + j * tile.value_dim + c * kLanes);
        }
        for (int r = 0; r < R; ++r) {
          const Vec w = broadcast(weights[r * kPartKeys + j]);
          for (int c = 0; c < kVecs; ++c) out[r][c] = fma(w, v[c], out[r][c]);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      float* to = sums.values + r * tile.value_dim + column0;
      for (int c = 0; c < kVecs; ++c) {
        if (kVecs == 1 && width < kLanes) {
          store_first(to, out[r][c], width);
        } else {
          store(to + c * kLanes, out[r][c]);
        }
      }
    }
  }
};

template <typename T, int R>
void attend_rows(const AttentionTile<T>& tile, int64_t begin, int64_t end, AttentionSums sums) {
  Part<T, R> part(tile, begin, end);
  int64_t block = part.first_block;
  for (; block + kBlocksAtOnce <= part.end_block; block += kBlocksAtOnce) part.template score<kBlocksAtOnce>(block);
  for (; block < part.end_block; ++block) part.template score<1>(block);
  part.weigh(sums);

  // As many columns at once as there are registers for.
  constexpr int kVecs = kAccumulators / R < 1 ? 1 : kAccumulators / R > 4 ? 4 : kAccumulators / R;
  int64_t column = 0;
  for (; column + kVecs * kLanes <= tile.value_dim; column += kVecs * kLanes) {
    part.template weighted_values<kVecs>(column, kLanes, sums);
  }
  for (; column < tile.value_dim; column += kLanes) {
    const int64_t rest = tile.value_dim - column;
    part.template weighted_values<1>(column, rest < kLanes ? static_cast<int>(rest) : kLanes, sums);
  }
}

// Calls attend_rows for the number of rows that the tile has, which its loops need to know when compiled.
template <typename T, int R = kTileRows>
void attend(const AttentionTile<T>& tile, int64_t begin, int64_t end, AttentionSums sums) {
  if constexpr (R > 1) {
    if (tile.rows < R) return attend<T, R - 1>(tile, begin, end, sums);
  }
  attend_rows<T, R>(tile, begin, end, sums);
}

inline void fold(AttentionSums into, AttentionSums part, int rows, int64_t value_dim) {
  for (int r = 0; r < rows; ++r) {
    if (part.weights[r] == 0.0f) continue;
    float *a = into.values + r * value_dim, *b = part.values + r * value_dim;
    const bool first = into.weights[r] == 0.0f;
    const float largest = first || part.largest[r] > into.largest[r] ? part.largest[r] : into.largest[r];
    const float keep = first ? 0.0f : exp_or_zero(into.largest[r] - largest);
    const float add = exp_or_zero(part.largest[r] - largest);
    into.largest[r] = largest;
    into.weights[r] = first ? part.weights[r] : into.weights[r] * keep + part.weights[r] * add;
    for (int64_t c = 0; c < value_dim; ++c) a[c] = first ? b[c] : a[c] * keep + b[c] * add;
  }
}

template <typename T>
void finish(AttentionSums sums, int row, int64_t value_dim, const float* sink, T* out) {
  float weights = sums.weights[row], keep = 1.0f;
  if (sink) {
    const float largest = *sink > sums.largest[row] ? *sink : sums.largest[row];
    keep = exp_or_zero(sums.largest[row] - largest);
    weights = weights * keep + exp_or_zero(*sink - largest);
  }
  const float* values = sums.values + row * value_dim;
  const Vec factor = broadcast(keep / weights);
  int64_t c = 0;
  for (; c + kLanes <= value_dim; c += kLanes) store(out + c, load(values + c) * factor);
  if (c < value_dim) {
    const int rest = static_cast<int>(value_dim - c);
    store_first(out + c, load_first(values + c, rest) * factor, rest);
  }
}

}  // namespace
}  // namespace tengserve
