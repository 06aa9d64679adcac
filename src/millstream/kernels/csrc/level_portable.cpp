// The kernels for any processor. Compiled with the flags of this level, see CMakeLists.txt.
#define MS_LEVEL portable
#define MS_KERNELS kKernelsPortable
#include "vec_portable.h"

#include "level.inl"
