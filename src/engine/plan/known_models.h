// Shapes of published models, for rows that name a model without its dimensions.
#pragma once

#include "engine/plan/fit/run_rows.h"

namespace tandem::plan {

/// Fills dimensions that `row` lacks from the published configuration of its model, found by the
/// beginning of its name. Values of the row are kept: proxies with fewer layers stay proxies.
void complete_model(RunRow& row);

}  // namespace tandem::plan
