// Which instruction set this process computes with.
#pragma once

#include "kernels.h"

namespace tengserve {

// The best that the CPU has, or the lesser one that the environment variable TENGSERVE_CPU_ISA names; decided once.
// Raises c10::Error where that names none, or one that the CPU lacks.
const Level& level();

}  // namespace tengserve
