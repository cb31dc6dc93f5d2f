// Which kernels this processor, with this operating system, can run.
#include "dispatch.h"

#include <stdexcept>

#ifdef KT_X86
#include <cpuid.h>
#endif

namespace kt {
namespace {

#ifdef KT_X86
bool has_f16c() {  // older compilers do not know its name
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & 1u << 29) != 0;
}

bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}
#endif

std::vector<const Kernels*> find() {
    std::vector<const Kernels*> found;
#ifdef KT_X86
    __builtin_cpu_init();  // asks the operating system too whether it keeps the wide registers
    if (has_avx512()) found.push_back(&kAvx512);
    if (has_avx2()) found.push_back(&kAvx2);
#endif
    found.push_back(&kPortable);
    return found;
}

}  // namespace

const std::vector<const Kernels*>& runnable_kernels() {
    static const std::vector<const Kernels*> found = find();
    return found;
}

const Kernels& kernels_named(const std::string& name) {
    for (const Kernels* kernels : runnable_kernels()) {
        if (name == kernels->name) return *kernels;
    }
    throw std::invalid_argument("this processor cannot run kernels named '" + name + "'");
}

}  // namespace kt
