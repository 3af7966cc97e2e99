// Checks of the links between the ranks of a world: contents that are known bit for bit, latency
// and bandwidth.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bench/machine/machine_check.h"
#include "tandem/communicator.h"

namespace tandem {

/// Deadline of the waits between phases, in those of a link: the ranks of an unreachable one come
/// up to three of these late.
constexpr double kPhaseDeadlines = 4;

struct LinkCheck {
  size_t message_bytes = 4u << 20;  ///< a multiple of 8 x ranks, or rounded up to one
  int messages = 5;                 ///< over each link in each direction; more over a fast one
  int pings = 100;
  double seconds = 5;  ///< without an answer, after which a link counts as unreachable
  CheckFault fault = CheckFault::none;  ///< of this rank: message: the next rank gets a wrong bit
};

/// Link from `from` to this rank.
struct LinkHealth {
  int from = 0, to = 0;
  bool shared_memory = false;
  bool unreachable = false;
  int64_t wrong_bytes = 0;
  double latency_us = 0;  ///< half of the fastest round trip
  double gbps = 0;        ///< of the fastest message, with the signal that asks for it
};

struct LinksHealth {
  std::vector<LinkHealth> incoming;  ///< of this rank, from every rank, also from itself
  double all_to_all_gbps = 0;        ///< that this rank receives while all send to all
  double ring_gbps = 0;  ///< an all-reduce by neighbours: 2 (N - 1) / N x its bytes a second
};

/// Collective. Every pair of ranks in rounds, as a tournament, so that no rank has two at once;
/// then, unless a link was unreachable on any rank, all at once, and a ring all-reduce of integers
/// in which every received partial sum is compared. `progress` is called with what begins. Sets the
/// communicator's deadline. Throws Timeout, which names a rank that does not come, and Aborted.
LinksHealth check_links(Communicator& comm, const LinkCheck& check,
                        const std::function<void(const std::string&)>& progress);

}  // namespace tandem
