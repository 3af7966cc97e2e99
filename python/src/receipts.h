// Receipts of operators as Python has them.
#pragma once

#include <nanobind/nanobind.h>

#include "overlap/contract/receipt.h"

namespace tandem::python {

namespace nb = nanobind;

/// Row of receipts.json as a dict.
nb::object to_dict(const Receipt& receipt);

void bind_receipts(nb::module_& m);

}  // namespace tandem::python
