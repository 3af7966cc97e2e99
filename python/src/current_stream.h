// The streams that frameworks have as their current ones in this thread.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>
#include <vector>

#include "gpu.h"

namespace tandem::python {

namespace nb = nanobind;

/// PyTorch's or CuPy's, by the framework of `like`, on that GPU. Throws InvalidArgument naming
/// `what` for what is of neither, and what is `expected`.
StreamNumber current_stream(nb::handle like, int device, std::string_view what,
                            const char* expected = "PyTorch's or CuPy's");
/// Of all frameworks that somebody has imported.
std::vector<StreamNumber> current_streams(int device);

}  // namespace tandem::python
