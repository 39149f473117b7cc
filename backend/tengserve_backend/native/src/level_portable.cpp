// No instruction set asked for: whatever the compiler takes as its base, NEON on ARM.
#include "vec_portable.h"

#include "level.h"

namespace tengserve {
const Level kPortable = make_level("portable");
}
