#include "isa.h"

#include "float16.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <string>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tengserve {
namespace {

struct Candidate {
  const Level* level;
  bool (*there)();
};

#ifdef __x86_64__
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_avx512_bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16");
}
bool has_amx() {
#ifdef __linux__
  // A process asks the system for the tiles' registers once, for all its threads; older systems know no such call.
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
#if TENGSERVE_FLOAT16
  if (!__builtin_cpu_supports("avx512fp16")) return false;
#endif
  return has_avx512_bf16() && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
         syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}
#endif

// Best first.
const Candidate kCandidates[] = {
#ifdef __x86_64__
    {&kAmx, has_amx},
    {&kAvx512Bf16, has_avx512_bf16},
    {&kAvx512, has_avx512},
    {&kAvx2, has_avx2},
#endif
    {&kPortable, [] { return true; }},
};

const Level& choose() {
  const char* wanted = std::getenv("TENGSERVE_CPU_ISA");
  std::string names;
  for (const Candidate& candidate : kCandidates) {
    names += (names.empty() ? "" : ", ") + std::string(candidate.level->name);
    if (wanted && std::strcmp(wanted, candidate.level->name) != 0) continue;
    if (candidate.there()) return *candidate.level;
    TORCH_CHECK(!wanted, "TENGSERVE_CPU_ISA is ", wanted, ", which this CPU does not have");
  }
  TORCH_CHECK(false, "TENGSERVE_CPU_ISA is \"", wanted, "\"; it must be one of ", names);
}

}  // namespace

const Level& level() {
  static const Level& chosen = choose();
  return chosen;
}

}  // namespace tengserve
