#include "cpu.h"

#if defined(MILLSTREAM_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace millstream {
namespace {

// Linux gives a process the tile registers only when it asks for them: saving them takes 8 KB more of signal stacks.
bool may_use_tiles() {
#if defined(MILLSTREAM_AMX)
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
    static const bool is_granted = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
                                   syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return is_granted;
#else
    return false;
#endif
}

}  // namespace

// __builtin_cpu_supports also asks the operating system (XGETBV) whether it saves the wide registers.
Level best_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Level::portable;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq")) {
        return Level::avx2;
    }
    if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vnni")) return Level::avx512;
    return may_use_tiles() ? Level::amx : Level::avx512_bf16;
#else
    return Level::portable;
#endif
}

}  // namespace millstream
