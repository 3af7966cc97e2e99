// Scaffnew (ProxSkip, arXiv 2202.09357): local steps between exchanges, of all clients and
// coordinates.
#include <algorithm>

#include "fit/methods/local_steps.h"
#include "fit/methods/rows.h"

namespace tandem::fit {

const MethodRow& scaffnew_row() {
  static const MethodRow row{"scaffnew",
                             "local steps with control variates between exchanges",
                             {&kPOption, &kStepOption},
                             false,
                             "averages over a random eighth of the clients, not over all",
                             [](const FitOptions& options) {
                               check_local_steps(options, options.clients, options.clients);
                             },
                             [](const Setup& setup) {
                               const int n = setup.channel.clients();
                               const bool control = setup.options.control;
                               const int cohort = control ? std::max(2, n / 8) : n;
                               return make_local_steps(setup, {.cohort = cohort,
                                                               .sparsity = cohort,
                                                               .p = choose_p(setup, n),
                                                               .partial_mean = control});
                             }};
  return row;
}

}  // namespace tandem::fit
