// Wire formats as passed from Python: as text, or as a tandem.Wire.
#pragma once

#include <nanobind/nanobind.h>

#include "tandem/codec.h"

namespace tandem::python {

namespace nb = nanobind;

/// Parses None, "int4:g32" or a Wire. Throws InvalidArgument for other text or types.
Wire wire_from(nb::handle codec);

void bind_wire(nb::module_& m);

}  // namespace tandem::python
