#ifdef __x86_64__
#include "vec_avx512.h"

#include "level.h"
#include "linear_amx.h"

namespace tengserve {
namespace {

constexpr Level make_amx_level() {
  Level level = make_level("amx");
  level.bf16.linear = linear_amx;
  level.bf16_rows = Bf16Rows::kTiles;
  return level;
}

}  // namespace

const Level kAmx = make_amx_level();
}  // namespace tengserve
#endif
