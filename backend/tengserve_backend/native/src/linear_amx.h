// The bfloat16 linear by the matrix unit: up to 32 rows of x times the 32 columns of a panel, 32 inputs a step. Any
// number of rows goes through it, so a row has the same bits in any company.
#pragma once

#include "amx.h"
#include "linear_kernel.h"

namespace tengserve {
namespace {

// Inputs of a step: two in each of the 16 columns of a tile of the panel.
constexpr int64_t kAmxStep = 32;
constexpr int kAmxRows = 2 * kTileHeight;

// Sums of rows [row0, row0 + 16) and, of kTiles 2, the 16 after them.
template <int kTiles>
inline void multiply_tiles(const LinearTask<Bf16>& task, int64_t row0, float* sums) {
  const Bf16* x = static_cast<const Bf16*>(task.x) + row0 * task.in;
  const Bf16* lower = x + kTileHeight * task.in;
  constexpr int64_t kPanelBytes = 2 * kPanelColumns * sizeof(Bf16), kSumBytes = kPanelColumns * sizeof(float);
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTiles > 1) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < task.in; k += kAmxStep) {
    const Bf16* step = task.panel + k * kPanelColumns;
    _tile_loadd(6, step, kPanelBytes);
    _tile_loadd(7, step + 2 * kTileHeight, kPanelBytes);
    _tile_loadd(4, x + k * kTileHeight, kTileBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTiles > 1) {
      _tile_loadd(5, lower + k * kTileHeight, kTileBytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, kSumBytes);
  _tile_stored(1, sums + kTileHeight, kSumBytes);
  if constexpr (kTiles > 1) {
    _tile_stored(2, sums + kTileHeight * kPanelColumns, kSumBytes);
    _tile_stored(3, sums + kTileHeight * kPanelColumns + kTileHeight, kSumBytes);
  }
}

inline void linear_amx(const LinearTask<Bf16>& task) {
  alignas(64) float sums[kAmxRows * kPanelColumns];
  for (int64_t row = 0; row < task.rows; row += kAmxRows) {
    const int rows = task.rows - row < kAmxRows ? static_cast<int>(task.rows - row) : kAmxRows;
    const int upper = rows < kTileHeight ? rows : kTileHeight;
    TileShapes shapes;
    // Sums 0 to 3, x 4 and 5, the panel 6 and 7.
    for (int tile = 0; tile < 4; ++tile) shapes.set(tile, tile < 2 ? upper : rows - upper, kTileBytes);
    shapes.set(4, upper, kTileBytes);
    shapes.set(5, rows - upper, kTileBytes);
    shapes.set(6, kTileHeight, kTileBytes);
    shapes.set(7, kTileHeight, kTileBytes);
    {
      const TilesInUse in_use(shapes);
      if (rows > kTileHeight) {
        multiply_tiles<2>(task, row, sums);
      } else {
        multiply_tiles<1>(task, row, sums);
      }
    }
    for (int r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < task.columns; c += kLanes) {
        store_sums(task, row + r, c, load(sums + r * kPanelColumns + c));
      }
    }
  }
}

}  // namespace
}  // namespace tengserve
