// Control plane of ranks that no launcher connects, but that can already gather bytes from each
// other, for example over the caller's communicator. That way rank 0 sends the others the address
// of its rendezvous server, and a random secret for this world, without which the port admits no
// process.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/rendezvous/connection.h"
#include "comm/rendezvous/launch.h"
#include "comm/rendezvous/secret.h"
#include "comm/same_build.h"
#include "tandem/communicator.h"

namespace tandem::control {

/// Collective: the bytes of every rank, concatenated. All ranks pass the same number of bytes.
using Gather = std::function<std::vector<std::byte>(std::span<const std::byte> local)>;

/// Address and secret by which ranks reach a server on rank 0.
struct ServerContact {
  Launch launch;
  Secret secret;        ///< new, for this world
  Connection listener;  ///< on rank 0 of several
};

/// Collective. Rank 0 listens, and the others learn where. `what` names the call in errors. Throws
/// Error if rank 0 cannot listen.
ServerContact contact_rank_zero(std::string_view what, int rank, int size, bool one_host,
                                const Gather& gather);

struct Newcomer {
  int rank = 0, size = 1;
  std::string node;     ///< equal for ranks of one host
  std::string refusal;  ///< reason this rank cannot take part; empty: it can
  Build build = this_build();
};

struct Connected {
  std::shared_ptr<Communicator> control;
  std::string world;  ///< a new name, equal on all ranks
};

/// Collective. `what` names the call in errors. If a rank has a refusal, every rank throws
/// InvalidArgument: its own refusal, or the first of the others with its rank. If a node has more
/// than `max_ranks_of_node` ranks, every rank throws Unsupported; if they run different programs,
/// Mismatch. Throws what a ControlCommunicator does.
Connected connect_ranks(std::string_view what, const Newcomer& local, const Gather& gather,
                        int max_ranks_of_node, double deadline_s);

}  // namespace tandem::control
