// Wire formats as Python passes them: by text, or as a tandem.Wire.
#pragma once

#include <nanobind/nanobind.h>

#include "tandem/codec.h"

namespace tandem::python {

namespace nb = nanobind;

/// None, "int4:g32" or a Wire. Throws InvalidArgument for another text or type.
Wire wire_from(nb::handle codec);

void bind_wire(nb::module_& m);

}  // namespace tandem::python
