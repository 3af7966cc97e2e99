// TAMUNA (Condat, Agarsky, Malinovsky, Richtarik, arXiv 2302.09832): CompressedScaffnew in which a
// cohort of the clients takes part in a round. A lost client is in no cohort.
#include <algorithm>

#include "fit/methods/local_steps.h"
#include "fit/methods/rows.h"

namespace tandem::fit {
namespace {

int choose_cohort(const FitOptions& options) {
  return options.cohort.value_or(std::max(2, options.clients / 4));
}

int choose_cohort_sparsity(const FitOptions& options) {
  return options.sparsity.value_or(std::max(2, choose_cohort(options) / 4));
}

}  // namespace

const MethodRow& tamuna_row() {
  static const MethodRow row{
      "tamuna",
      "compressed-scaffnew in which a random cohort takes part in a round",
      {&kPOption, &kStepOption, &kSparsityOption, &kCohortOption, &kFailOption},
      false,
      "control variates change on all coordinates, not on sent ones",
      [](const FitOptions& options) {
        check_local_steps(options, choose_cohort(options), choose_cohort_sparsity(options));
      },
      [](const Setup& setup) {
        const int sparsity = choose_cohort_sparsity(setup.options);
        return make_local_steps(setup, {.cohort = choose_cohort(setup.options),
                                        .sparsity = sparsity,
                                        .p = choose_p(setup, sparsity),
                                        .all_coordinates = setup.options.control});
      }};
  return row;
}

}  // namespace tandem::fit
