// The bfloat16 linear by the matrix unit: up to 32 rows of x times the 32 columns of a panel, 32 inputs a step. Any
// number of rows goes through it, so a row has the same bits in any company.
#pragma once

#include "amx.h"
#include "linear_kernel.h"
#include "linear_unpack_amx.h"

namespace tengserve {
namespace {

// Inputs of a step: two in each of the 16 columns of a tile of the panel.
constexpr int64_t kAmxStep = 32;
static_assert(kAmxStep == kGroupInputs, "a step multiplies one group");
constexpr int kAmxRows = 2 * kTileHeight;
constexpr int64_t kLine = 64;
// Bytes of the weight to be ahead where a step has no more to do than to read them.
constexpr int64_t kAmxAhead = 4096;

// What comes into a cache while rows are multiplied: at each step `bytes` of the weight, step_bytes after those of the
// step before, up to `end`.
struct Ahead {
  const char *from, *end;
  int64_t step_bytes, bytes;
};

// kFar: into the second-level cache, for the first one is full of what is multiplied now.
template <bool kFar>
inline void fetch(const Ahead& ahead, int64_t step) {
  const char* from = ahead.from + step * ahead.step_bytes;
  if (from >= ahead.end) return;
  for (int64_t line = 0; line < ahead.bytes; line += kLine) __builtin_prefetch(from + line, 0, kFar ? 2 : 3);
}

// Tiles 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 the panel.
inline TileShapes linear_shapes(int upper, int lower) {
  TileShapes shapes;
  for (int tile = 0; tile < 4; ++tile) shapes.set(tile, tile < 2 ? upper : lower, kTileBytes);
  shapes.set(4, upper, kTileBytes);
  shapes.set(5, lower, kTileBytes);
  shapes.set(6, kTileHeight, kTileBytes);
  shapes.set(7, kTileHeight, kTileBytes);
  return shapes;
}

template <int kTiles>
inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTiles > 1) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

// One step of kTiles times 16 rows. Rows of x that come by once a panel, kStreamed, leave the first-level cache to the
// panel.
template <int kTiles, bool kStreamed>
inline void multiply_step_amx(const Bf16* x, const Bf16* lower, const Bf16* weights) {
  constexpr int64_t kPanelBytes = 2 * kPanelColumns * sizeof(Bf16);
  _tile_loadd(6, weights, kPanelBytes);
  _tile_loadd(7, weights + 2 * kTileHeight, kPanelBytes);
  if constexpr (kStreamed) {
    _tile_stream_loadd(4, x, kTileBytes);
  } else {
    _tile_loadd(4, x, kTileBytes);
  }
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (kTiles > 1) {
    if constexpr (kStreamed) {
      _tile_stream_loadd(5, lower, kTileBytes);
    } else {
      _tile_loadd(5, lower, kTileBytes);
    }
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Sums [kTiles * 16][32].
template <int kTiles>
inline void store_tiles(float* sums) {
  constexpr int64_t kSumBytes = kPanelColumns * sizeof(float);
  _tile_stored(0, sums, kSumBytes);
  _tile_stored(1, sums + kTileHeight, kSumBytes);
  if constexpr (kTiles > 1) {
    _tile_stored(2, sums + kTileHeight * kPanelColumns, kSumBytes);
    _tile_stored(3, sums + kTileHeight * kPanelColumns + kTileHeight, kSumBytes);
  }
  written_for_tiles();
}

template <WeightKind kKind>
inline void store_rows(const LinearTask<Bf16>& task, const Panel<Bf16>& panel, int64_t row0, int rows,
                       const float* sums) {
  constexpr bool kInteger = kKind != WeightKind::kFloat;
  if (panel.columns == kPanelColumns && !task.bias) {
    Vec factors[] = {zeros(), zeros()};
    for (int h = 0; kInteger && h < 2; ++h) factors[h] = load(panel.factors + h * kLanes);
    const auto result = [&](int h) {
      const Vec own = load(sums + h * kLanes);
      // One after the other: the two factors together may be more than float32 has.
      return kInteger ? (own * broadcast(kIntegerScale) * factors[h]).v : own.v;
    };
    Bf16* to = task.out + row0 * task.out_stride + panel.column;
    for (int r = 0; r < rows; ++r, sums += kPanelColumns, to += task.out_stride) {
      _mm512_storeu_si512(to, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(result(1), result(0))));
    }
    return;
  }
  for (int r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < panel.columns; c += kLanes) {
      const Vec own = load(sums + r * kPanelColumns + c);
      store_sums(task, panel, row0 + r, c, kInteger ? own * broadcast(kIntegerScale) : own);
    }
  }
}

// Rows of x from row0 on times a panel that lies there in bfloat16.
template <int kTiles, bool kStreamed>
inline void multiply_rows(const LinearTask<Bf16>& task, const Bf16* weights, int64_t row0, const Ahead& ahead,
                          float* sums) {
  const int64_t in = task.weight->in;
  const Bf16* x = static_cast<const Bf16*>(task.x) + row0 * in;
  const Bf16* lower = x + kTileHeight * in;
  zero_sums<kTiles>();
  for (int64_t k = 0, step = 0; k < in; k += kAmxStep, ++step) {
    fetch<kStreamed>(ahead, step);
    multiply_step_amx<kTiles, kStreamed>(x + k * kTileHeight, lower + k * kTileHeight, weights + k * kPanelColumns);
  }
  store_tiles<kTiles>(sums);
}

// Up to 32 rows: the whole weight is read once, and integers become numbers on the way.
template <WeightKind kKind, int kTiles>
inline void linear_few_rows(const LinearTask<Bf16>& task) {
  alignas(64) float sums[kAmxRows * kPanelColumns];
  const PackedWeight& weight = *task.weight;
  constexpr int64_t kBytes = group_bytes<Bf16>(kKind);
  // Past the task's own panels too: whoever takes them is soon there.
  const char* const end = weight.panels + (weight.out + kPanelColumns - 1) / kPanelColumns * weight.panel_bytes;
  for (int64_t index = task.panel; index < task.end_panel; ++index) {
    const Panel<Bf16> panel = panel_of<Bf16>(task, index, nullptr);
    if constexpr (kKind == WeightKind::kFloat) {
      const Ahead ahead{reinterpret_cast<const char*>(panel.weights) + kAmxAhead, end, kBytes, kBytes};
      multiply_rows<kTiles, false>(task, panel.weights, 0, ahead, sums);
    } else {
      // Products that follow other vector instructions cost much more than those that follow products, so some groups
      // are unpacked first.
      constexpr int64_t kTogether = kTiles == 1 ? 4 : 2;
      alignas(64) Bf16 numbers[kTogether * kGroupNumbers];
      const Ahead ahead{panel.groups + kAmxAhead, end, kBytes, kBytes};
      const Bf16* x = static_cast<const Bf16*>(task.x);
      const Bf16* lower = x + kTileHeight * weight.in;
      const int64_t steps = weight.in / kAmxStep;
      zero_sums<kTiles>();
      for (int64_t first = 0; first < steps; first += kTogether) {
        const int64_t count = steps - first < kTogether ? steps - first : kTogether;
        for (int64_t i = 0; i < count; ++i) {
          fetch<false>(ahead, first + i);
          unpack_scaled<kKind>(panel.groups + (first + i) * kBytes, numbers + i * kGroupNumbers);
        }
        written_for_tiles();
        for (int64_t i = 0; i < count; ++i) {
          const int64_t k = (first + i) * kAmxStep * kTileHeight;
          multiply_step_amx<kTiles, false>(x + k, lower + k, numbers + i * kGroupNumbers);
        }
      }
      store_tiles<kTiles>(sums);
    }
    store_rows<kKind>(task, panel, 0, static_cast<int>(task.rows), sums);
  }
}

// More rows: a panel stays in the cache for all of them, and the next one is fetched meanwhile.
template <WeightKind kKind>
inline void linear_many_rows(const LinearTask<Bf16>& task) {
  alignas(64) float sums[kAmxRows * kPanelColumns];
  const PackedWeight& weight = *task.weight;
  constexpr int64_t kBytes = group_bytes<Bf16>(kKind);
  const int64_t blocks = (task.rows + kAmxRows - 1) / kAmxRows;
  const char* const end = weight.panels + task.end_panel * weight.panel_bytes;
  for (int64_t index = task.panel; index < task.end_panel; ++index) {
    const Panel<Bf16> panel = panel_of<Bf16>(task, index, task.scratch);
    const char* next = weight.panels + (index + 1) * weight.panel_bytes;
    if constexpr (kKind != WeightKind::kFloat) {
      const char* from = panel.groups;
      for (int64_t k = 0; k < weight.in; k += kGroupInputs, from += kBytes) {
        unpack_scaled<kKind>(from, task.scratch + k * kPanelColumns);
      }
      written_for_tiles();
    }
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t row0 = block * kAmxRows;
      const int rows = task.rows - row0 < kAmxRows ? static_cast<int>(task.rows - row0) : kAmxRows;
      // Each block of rows fetches its part of every step.
      constexpr int64_t kLines = kBytes / kLine;
      const int64_t first = kLines * block / blocks, last = kLines * (block + 1) / blocks;
      const Ahead ahead{next + first * kLine, end, kBytes, (last - first) * kLine};
      for (int r = 0; r < rows; ++r) __builtin_prefetch(task.out + (row0 + r) * task.out_stride + panel.column, 1);
      if (rows > kTileHeight) {
        multiply_rows<2, true>(task, panel.weights, row0, ahead, sums);
      } else {
        multiply_rows<1, true>(task, panel.weights, row0, ahead, sums);
      }
      store_rows<kKind>(task, panel, row0, rows, sums);
    }
  }
}

template <WeightKind kKind>
inline void linear_amx_of(const LinearTask<Bf16>& task) {
  if (task.rows > kAmxRows) {
    // Tiles of the last rows are multiplied whole; what is in the rest of them goes nowhere.
    const TilesInUse in_use(linear_shapes(kTileHeight, kTileHeight));
    linear_many_rows<kKind>(task);
    return;
  }
  const int rows = static_cast<int>(task.rows), upper = rows < kTileHeight ? rows : kTileHeight;
  const TilesInUse in_use(linear_shapes(upper, rows - upper));
  if (rows > kTileHeight) {
    linear_few_rows<kKind, 2>(task);
  } else {
    linear_few_rows<kKind, 1>(task);
  }
}

inline void linear_amx(const LinearTask<Bf16>& task) {
  switch (task.weight->kind) {
    case WeightKind::kFloat:
      return linear_amx_of<WeightKind::kFloat>(task);
    case WeightKind::kInt8:
      return linear_amx_of<WeightKind::kInt8>(task);
    case WeightKind::kInt4:
      return linear_amx_of<WeightKind::kInt4>(task);
  }
}

}  // namespace
}  // namespace tengserve
