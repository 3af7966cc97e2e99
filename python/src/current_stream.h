// Current streams of the frameworks in this thread.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>
#include <vector>

#include "gpu.h"

namespace tandem::python {

namespace nb = nanobind;

/// Current stream of PyTorch or CuPy, by the framework of `like`, on that GPU. Throws
/// InvalidArgument naming `what` and `expected` for any other framework.
StreamNumber current_stream(nb::handle like, int device, std::string_view what,
                            const char* expected = "PyTorch's or CuPy's");
/// Current streams of all imported frameworks.
std::vector<StreamNumber> current_streams(int device);

}  // namespace tandem::python
