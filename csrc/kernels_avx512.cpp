// The kernels with AVX-512 F, BW, VL, DQ and VNNI. Compiled with those flags; run only where the processor has them.
#include "attend.h"
#include "ops_avx512.h"
#include "seal.h"

namespace kt {

const Kernels kAvx512 = {"avx512", attend<Avx512>, merge<Avx512>, seal<Avx512>};

}  // namespace kt
