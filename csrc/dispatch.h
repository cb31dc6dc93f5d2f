#pragma once

#include <string>
#include <vector>

#include "calls.h"

namespace kt {

// The kernels this processor can run, best first.
const std::vector<const Kernels*>& runnable_kernels();

// By name; throws std::invalid_argument where this processor cannot run them.
const Kernels& kernels_named(const std::string& name);

}  // namespace kt
