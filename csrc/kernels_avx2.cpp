// The kernels with AVX2, FMA and F16C. Compiled with those flags; run only where the processor has them.
#include "attend.h"
#include "decoder.h"
#include "ops_avx2.h"
#include "seal.h"

namespace kt {

const Kernels kAvx2 = {"avx2", attend<Avx2>, merge<Avx2>, seal<Avx2>, norm<Avx2>, rotate<Avx2>, gate<Avx2>};

}  // namespace kt
