// The control plane of ranks that no launcher introduces, but that can already gather bytes from
// each other, by a communicator of the caller's for example. Rank 0 tells the others that way where
// its hub listens, and a secret that it has drawn for this world. So no port is open to whom it has
// not told.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tandem/communicator.h"

namespace tandem::control {

/// Collective: the bytes of every rank, one after the other. All ranks bring as many.
using Gather = std::function<std::vector<std::byte>(std::span<const std::byte> mine)>;

struct Newcomer {
  int rank = 0, size = 1;
  std::string node;     ///< the same for ranks of one host
  std::string refusal;  ///< why this rank cannot take part; empty: it can
};

struct Met {
  std::shared_ptr<Communicator> control;
  std::string world;  ///< a new name, the same on all ranks
};

/// Collective. `what`: the call, for errors. Throws InvalidArgument on every rank where one has a
/// refusal: its own one, or the first other, naming the rank; Unsupported on every rank where more
/// than `most_of_a_node` are of one; and what a ControlCommunicator throws.
Met meet(std::string_view what, const Newcomer& mine, const Gather& gather, int most_of_a_node,
         double deadline_s);

}  // namespace tandem::control
