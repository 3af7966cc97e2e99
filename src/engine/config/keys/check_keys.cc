#include "engine/config/keys/check_keys.h"

#include "engine/config/config_slot.h"

namespace tandem {

std::vector<ConfigKey> check_keys() {
  return {
      {"check.action",
       TANDEM_SLOT(check.action),
       0,
       0,
       {"off", "warn", "stop", "replace"},
       "if data in memory turn out to be corrupt: name the rank (warn), and end the run without "
       "saving them (stop) or have tandem launch --spares replace the rank (replace); off: no "
       "check"},
      {"check.weights",
       TANDEM_SLOT(check.weights),
       0,
       1,
       {},
       "share of the weights that several ranks hold, compared in each step"},
      {"check.state",
       TANDEM_SLOT(check.state),
       0,
       1,
       {},
       "share of the optimizer's state whose hash is compared from one update to the next"},
      {"check.recompute",
       TANDEM_SLOT(check.recompute),
       0,
       1,
       {},
       "share of the steps whose gradients are computed twice and compared"},
  };
}

}  // namespace tandem
