// World of processes of ranks that no launcher connects, but that can already gather bytes from
// each other (comm/rendezvous/contact.h). A process may hold several such ranks and worlds.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "comm/rendezvous/contact.h"
#include "comm/world/same_build.h"
#include "tandem/communicator.h"

namespace tandem::processes {

struct Newcomer {
  int rank = 0, size = 1;
  std::string node;     ///< equal for ranks of one host
  std::string refusal;  ///< reason this rank cannot take part; empty: it can
  Build build = this_build();
};

struct Connected {
  std::shared_ptr<Communicator> comm;  ///< as new_member (rank.h)
  std::string world;                   ///< a new name, equal on all ranks
};

/// Collective. `what` names the call in errors. If a rank has a refusal, every rank throws
/// InvalidArgument: the local refusal, or else the first remote one with its rank. If a node has
/// more than `max_ranks_of_node` ranks, every rank throws Unsupported; if they run different
/// programs, Mismatch. Throws as new_member.
Connected connect_ranks(std::string_view what, const Newcomer& local, const control::Gather& gather,
                        int max_ranks_of_node, double deadline_s);

}  // namespace tandem::processes
