// One fp16 or bf16 at a time, to and from float, on any machine.
#pragma once

#include <cstring>

#include "forms.h"

namespace kt {
namespace {

inline float half_to_float(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
    const uint32_t magnitude = bits & 0x7fff;
    float value;
    if (magnitude >= 0x7c00) {  // infinite or NaN
        const uint32_t wide = sign | 0x7f800000u | (magnitude & 0x3ff) << 13;
        std::memcpy(&value, &wide, 4);
        return value;
    }
    // Moved into place the exponent is too small by 112; the product also turns subnormal halves into normal floats.
    const uint32_t wide = magnitude << 13;
    std::memcpy(&value, &wide, 4);
    value *= 0x1p112f;
    return sign ? -value : value;
}

inline uint16_t float_to_half(float value) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | 0x7e00;
    if (magnitude >= 0x477ff000) return sign | 0x7c00;  // rounds to 65,536 or more
    if (magnitude < 0x38800000) {                       // subnormal half: let the adder round at the right bit
        float absolute;
        std::memcpy(&absolute, &magnitude, 4);
        absolute += 0.5f;
        uint32_t rounded;
        std::memcpy(&rounded, &absolute, 4);
        return sign | static_cast<uint16_t>(rounded - 0x3f000000);
    }
    return sign | static_cast<uint16_t>((magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13);
}

inline float bfloat_to_float(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

inline uint16_t float_to_bfloat(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float to_float(float value) { return value; }
inline float to_float(bf16 value) { return bfloat_to_float(value.bits); }
inline float to_float(fp16 value) { return half_to_float(value.bits); }
inline void from_float(float value, float* to) { *to = value; }
inline void from_float(float value, bf16* to) { to->bits = float_to_bfloat(value); }
inline void from_float(float value, fp16* to) { to->bits = float_to_half(value); }

}  // namespace
}  // namespace kt
