#ifdef __x86_64__
#include "vec_avx512.h"

#include "level.h"

namespace tengserve {
const Level kAvx512 = make_level("avx512");
}
#endif
