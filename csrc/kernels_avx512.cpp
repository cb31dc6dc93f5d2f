// The kernels with AVX-512 F, BW, VL, DQ and VNNI. Compiled with those flags; run only where the processor has them.
#include "attend.h"
#include "decoder.h"
#include "ops_avx512.h"
#include "seal.h"

namespace kt {

const Kernels kAvx512 = {"avx512", attend<Avx512>, merge<Avx512>, seal<Avx512>, norm<Avx512>, rotate<Avx512>, gate<Avx512>};

}  // namespace kt
