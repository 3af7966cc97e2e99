// Receipts of operators as Python has them.
#pragma once

#include <nanobind/nanobind.h>

#include "overlap/contract/layer_receipts.h"

namespace tandem::python {

namespace nb = nanobind;

/// Row of receipts.json as a dict.
nb::object to_dict(const Receipt& receipt);
/// Rows of receipts.json as a list of dicts.
nb::object to_list(const LayerReceipts& receipts);

/// Documentation of a layer's property of that name.
constexpr const char* kReceiptsOfLayer =
    "Rows of receipts() of its forward pass and, if it can run, its backward pass; those without\n"
    "calls, too.";

void bind_receipts(nb::module_& m);

}  // namespace tandem::python
