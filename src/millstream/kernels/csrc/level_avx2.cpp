// The kernels for AVX2 and FMA. Compiled with the flags of this level, see CMakeLists.txt.
#define MS_LEVEL avx2
#define MS_KERNELS kKernelsAvx2
#include "vec_avx2.h"

#include "level.inl"
