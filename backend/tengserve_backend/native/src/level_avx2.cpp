#ifdef __x86_64__
#include "vec_avx2.h"

#include "level.h"

namespace tengserve {
const Level kAvx2 = make_level("avx2");
}
#endif
