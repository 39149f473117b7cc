#ifdef __x86_64__
#include "vec_avx512.h"

#include "level.h"

namespace tengserve {
const Level kAvx512Bf16 = make_level("avx512_bf16");
}
#endif
