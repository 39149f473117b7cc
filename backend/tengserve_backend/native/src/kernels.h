// What the operators call and each instruction set provides: a table of functions. Tensors are checked before; nothing
// here checks again.
//
// A row of a result depends on that row's own inputs alone, bit for bit: however many rows a call has, whichever
// thread computes it and wherever its sequence lies in a batch. Therefore every sum runs over its terms in an order
// that follows from the row's own position and the sizes, never from the tile that the row happens to be in.
#pragma once

#include <cstdint>

#include "bf16.h"
#include "half.h"

namespace tengserve {

// Tokens of a cache block: one Vec of keys.
constexpr int64_t kBlockSize = 16;
// Keys that are attended in one go. Their scores stay in the first-level cache; a sequence with more is folded together
// from parts that begin at multiples of this, so the split of a long one over threads does not show in the bits.
constexpr int64_t kPartKeys = 256;
// No tile has more rows than this, whatever the instruction set.
constexpr int kMaxTileRows = 16;
// Output columns that lie together in a packed weight.
constexpr int64_t kPanelColumns = 32;

// Query rows of one sequence that share a key and value head.
//
// Pages of one head: keys are [key_dim][16] in float32, and in bfloat16 [key_dim / 2][16][2], that is pairs of
// dimensions, then [16] for an odd last one; so a register holds sixteen keys and no sum runs across it. Values are
// [16][value_dim].
template <typename T>
struct AttentionTile {
  const T* keys;           // of the head in block 0
  const T* values;         // of the head in block 0
  int64_t keys_a_block;    // elements of keys from a block to the next, all heads
  int64_t values_a_block;  // likewise
  const int32_t* blocks;   // the sequence's
  int64_t key_dim, value_dim;
  int rows;
  const T* query[kMaxTileRows];  // key_dim elements each
  // Positions that each row sees; both ends are seen.
  int64_t first[kMaxTileRows], last[kMaxTileRows];
  float scale;
  float softcap;  // 0: none
  float* packed;  // key_dim * kMaxTileRows; `pack_query` writes, `attend` reads
};

// Softmax-weighted values of each row of a tile over some of its keys, not yet divided by the weights' sum.
struct AttentionSums {
  float* largest;  // [kMaxTileRows], of the scores
  float* weights;  // [kMaxTileRows]; 0: no key of the part is seen
  float* values;   // [kMaxTileRows][value_dim]
  static int64_t size(int64_t value_dim) { return kMaxTileRows * (2 + value_dim); }
  static AttentionSums at(float* memory) {
    return {memory, memory + kMaxTileRows, memory + 2 * kMaxTileRows};
  }
};

template <typename T>
struct AttentionKernels {
  int tile_rows;  // of a tile, at most
  void (*pack_query)(const AttentionTile<T>&);
  // Positions [begin, end), which lie in one part, begin at its start or later.
  void (*attend)(const AttentionTile<T>&, int64_t begin, int64_t end, AttentionSums);
  // into = into and part; parts come in order of their positions.
  void (*fold)(AttentionSums into, AttentionSums part, int rows, int64_t value_dim);
  // One row's answer; sink is one more score without a value, or null.
  void (*finish)(AttentionSums, int row, int64_t value_dim, const float* sink, T* out);
};

// How a packed weight keeps its numbers. It lies in panels of 32 output columns, one after the other, each read from
// front to back.
enum class WeightKind : uint8_t {
  kFloat,  // in the type they are multiplied in: [in][32] for float32, [in / 2][32][2] for bfloat16
  kInt8,   // a factor for each column, then an Int8Group for each 32 inputs: a number is factor * (scale * integer)
  kInt4,   // likewise an Int4Group: factor * (scale * integer + minimum)
};

// Groups hold sixteen columns of an even and an odd input side by side: input 2 * s + p of column 16 * h + i is at
// [s][h][i][p]. So a register full of them has one column a lane, in which they make the pairs of bfloat16. A number is
// rounded to bfloat16, before its factor, where that is what is multiplied: to the nearest, of two the greater magnitude.
// An instruction set may round it to float16 before, which has three bits more.
constexpr int64_t kGroupInputs = 32;
// Of a column's scales and minimums the one of largest magnitude is 128 to 256: the column's factor is a power of two
// that makes it so. Then float16 has all numbers of a column, but for those that are nothing beside the largest. It is 0
// where all are, and NaN where one is not finite.
constexpr int kLargestExponent = 8;

// What a panel of integers begins with; sums of columns are multiplied by it.
struct PanelFactors {
  float columns[kPanelColumns];
};

struct Int8Group {
  Half scales[32];
  int8_t integers[16][2][16][2];  // [s][h][i][p]
};

struct Int4Group {
  Half scales[32], minimums[32];
  uint16_t codes[2][4][16][2];  // [h][s / 4][i][p]; the (s % 4)-th 4 bits
};
static_assert(sizeof(PanelFactors) == 128 && sizeof(Int8Group) == 1088 && sizeof(Int4Group) == 640,
              "parts of a panel are whole cache lines");

struct PackedWeight {
  WeightKind kind;
  const char* panels;
  int64_t panel_bytes;
  int64_t in;   // a multiple of 32 but for float32 of kFloat; zeros fill it up
  int64_t out;  // the last panel may have columns of zeros beyond
};

// Rows of x times some panels of a packed weight.
template <typename T>
struct LinearTask {
  const PackedWeight* weight;
  const void* x;  // [rows][weight->in]; for bfloat16 as the Level's bf16_rows says, from a tile's first row on
  int64_t rows;
  int64_t panel, end_panel;
  const T* bias;  // [weight->out], or null
  T* out;         // [rows], each out_stride after the one before, column 0 of the weight first
  int64_t out_stride;
  T* scratch;  // for other kinds than kFloat: in * 32 numbers, on a cache line
};

// `out` may be the first argument.
template <typename T>
struct RowKernels {
  // x * 1/sqrt(mean(x^2) + eps), rounded to T, times weight.
  void (*rms_norm)(const T* x, const T* weight, float eps, int64_t size, T* out);
  // silu(gate), rounded to T, times up.
  void (*silu_mul)(const T* gate, const T* up, int64_t size, T* out);
  // x * cos + (-x[half:], x[:half]) * sin, each product and the sum rounded to T.
  void (*rotary)(const T* x, const T* cos, const T* sin, int64_t size, T* out);
  // a + b
  void (*add)(const T* a, const T* b, int64_t size, T* out);
  // Where the first of the largest is; -1 where that is not finite, or one is a NaN.
  int64_t (*first_maximum)(const T* x, int64_t size);
};

template <typename T>
struct Kernels {
  AttentionKernels<T> any_attention;      // for heads of any dimensions
  AttentionKernels<T> aligned_attention;  // for a key_dim that is a multiple of 32 and a value_dim that is one of 16
  void (*linear)(const LinearTask<T>&);
  RowKernels<T> row;
};

// How the linear of bfloat16 reads x; zeros follow where `in` is no multiple.
enum class Bf16Rows {
  kFloat32,  // [rows][in] in float32, in a multiple of 2
  kPairs,    // [rows][in], likewise
  kTiles,    // [rows / 16][in / 32][16][32]
};

struct Level {
  const char* name;
  Bf16Rows bf16_rows;
  Kernels<float> f32;
  Kernels<Bf16> bf16;

  template <typename T>
  const Kernels<T>& kernels() const;
};

template <>
inline const Kernels<float>& Level::kernels<float>() const {
  return f32;
}
template <>
inline const Kernels<Bf16>& Level::kernels<Bf16>() const {
  return bf16;
}

extern const Level kPortable;
#ifdef __x86_64__
extern const Level kAvx2, kAvx512, kAvx512Bf16, kAmx;
#endif

}  // namespace tengserve
