// The kernels in plain C++: what every machine can run.
#include "attend.h"
#include "decoder.h"
#include "ops_portable.h"
#include "seal.h"

namespace kt {

const Kernels kPortable = {"portable", attend<Portable>, merge<Portable>, seal<Portable>, norm<Portable>, rotate<Portable>, gate<Portable>};

int64_t scratch_bytes(int rows, const Heads& heads) {
    Scratch scratch;
    return carve(nullptr, rows, heads, scratch);
}

}  // namespace kt
