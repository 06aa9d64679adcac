// The kernels for AVX-512 F, BW, VL and DQ. Compiled with the flags of this level, see CMakeLists.txt.
#define MS_LEVEL avx512
#define MS_KERNELS kKernelsAvx512
#include "vec_avx512.h"

#include "level.inl"
