// CompressedScaffnew (Condat, Agarsky, Richtarik, arXiv 2210.13277): Scaffnew in which a client
// sends up the coordinates of a random mask only.
#include <algorithm>

#include "fit/methods/local_steps.h"
#include "fit/methods/rows.h"

namespace tandem::fit {
namespace {

int choose_mask_sparsity(const FitOptions& options) {
  return options.sparsity.value_or(std::max(2, options.clients / 4));
}

}  // namespace

const MethodRow& compressed_scaffnew_row() {
  static const MethodRow row{
      "compressed-scaffnew",
      "scaffnew that sends a random share of the coordinates up",
      {&kPOption, &kStepOption, &kSparsityOption},
      false,
      "control variates change on all coordinates, not on sent ones",
      [](const FitOptions& options) {
        check_local_steps(options, options.clients, choose_mask_sparsity(options));
      },
      [](const Setup& setup) {
        const int sparsity = choose_mask_sparsity(setup.options);
        return make_local_steps(setup, {.cohort = setup.channel.clients(),
                                        .sparsity = sparsity,
                                        .p = choose_p(setup, sparsity),
                                        .all_coordinates = setup.options.control});
      }};
  return row;
}

}  // namespace tandem::fit
