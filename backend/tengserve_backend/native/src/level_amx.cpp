#ifdef __x86_64__
#include "float16.h"

#if TENGSERVE_FLOAT16
// Not an option of the command, which older compilers refuse.
#pragma GCC target("avx512fp16")
#endif

#include "vec_avx512.h"

#include "level.h"

#include "attention_amx.h"
#include "linear_amx.h"

namespace tengserve {
namespace {

constexpr Level make_amx_level() {
  Level level = make_level("amx");
  level.bf16.aligned_attention = {kTileHeight, pack_query_amx, attend_amx, fold, finish<Bf16>};
  level.bf16.linear = linear_amx;
  level.bf16_rows = Bf16Rows::kTiles;
  return level;
}

}  // namespace

const Level kAmx = make_amx_level();
}  // namespace tengserve
#endif
