// TAMUNA (Condat, Agarsky, Malinovsky, Richtarik, arXiv 2302.09832): CompressedScaffnew in which a
// cohort of the clients takes part in a round. A lost client is in no cohort.
#include <algorithm>

#include "fit/methods/local_steps.h"
#include "fit/methods/rows.h"

namespace tandem::fit {

const MethodRow& tamuna_row() {
  static const MethodRow row{
      "tamuna",
      "compressed-scaffnew in which a random cohort takes part in a round",
      {&kPOption, &kStepOption, &kSparsityOption, &kCohortOption, &kFailOption},
      false,
      "control variates change on all coordinates, not on sent ones",
      [](const Setup& setup) {
        const int n = setup.channel.clients();
        const int cohort = setup.options.cohort.value_or(std::max(std::min(2, n), n / 4));
        const int sparsity = setup.options.sparsity.value_or(std::max(2, cohort / 4));
        return make_local_steps(setup, {.cohort = cohort,
                                        .sparsity = sparsity,
                                        .p = choose_p(setup, sparsity),
                                        .all_coordinates = setup.options.control});
      }};
  return row;
}

}  // namespace tandem::fit
