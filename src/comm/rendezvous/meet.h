// The control plane of ranks that no launcher introduces, but that can already gather bytes from
// each other, by a communicator of the caller's for example. Rank 0 tells the others that way where
// its hub listens, and a secret that it has drawn for this world. Nobody else can enter by the
// port.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/same_build.h"
#include "tandem/communicator.h"

namespace tandem::control {

/// Collective: the bytes of every rank, one after the other. All ranks give equally many.
using Gather = std::function<std::vector<std::byte>(std::span<const std::byte> mine)>;

struct Newcomer {
  int rank = 0, size = 1;
  std::string node;     ///< the same for ranks of one host
  std::string refusal;  ///< why this rank cannot take part; empty: it can
  Build build = this_build();
};

struct Met {
  std::shared_ptr<Communicator> control;
  std::string world;  ///< a new name, the same on all ranks
};

/// Collective. `what` names the call in errors. If a rank has a refusal, every rank throws
/// InvalidArgument: its own refusal, or the first of the others with its rank. If a node has more
/// than `most_of_a_node` ranks, every rank throws Unsupported; if they run different programs,
/// Mismatch. Throws what a ControlCommunicator does.
Met meet(std::string_view what, const Newcomer& mine, const Gather& gather, int most_of_a_node,
         double deadline_s);

}  // namespace tandem::control
