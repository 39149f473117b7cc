// Whether the compiler knows float16 arithmetic; the ones that do not make integers into numbers by way of float32.
#pragma once

#if defined(__x86_64__) && !defined(__clang__) && __GNUC__ >= 12
#define TENGSERVE_FLOAT16 1
#else
#define TENGSERVE_FLOAT16 0
#endif
