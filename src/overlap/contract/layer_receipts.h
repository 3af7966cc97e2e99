// Receipts of a layer whose class does not show them: those that its construction lists.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "overlap/contract/receipt.h"

namespace tandem {

using LayerReceipts = std::vector<std::shared_ptr<const Receipt>>;

/// Receipts that this thread lists (list_receipt) while `make` runs, in order: of a layer that is
/// made there, one for each pass that it can run. They count its calls. Rethrows.
LayerReceipts collect_receipts(const std::function<void()>& make);

}  // namespace tandem
