// Ranks as processes, each with a communicator on the control plane.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "comm/rendezvous/control_communicator.h"

namespace tandem::test {

// What a rank's process reports by its exit status; the last two name the last rank.
enum Status {
  kRight = 0,
  kWrong = 1,
  kRefused = 10,  // InvalidArgument
  kMismatch = 11,
  kTimeoutNamesIt = 20,
  kAbortedNamesIt = 21
};

/// Where a world of `size` meets: on a local socket, or on a TCP port that is free.
Launch place(int size, bool one_host);
/// The secret that the ranks have there.
control::Secret secret_of(const Launch& launch);

/// A process for each of the `present` ranks, in order.
std::vector<pid_t> start(Launch launch, const std::vector<int>& present, double deadline_s,
                         const std::function<int(Communicator&)>& body);
/// Their statuses, -signal for those that were killed.
std::vector<int> finish(const std::vector<pid_t>& children);

std::vector<int> all_ranks(int size);

}  // namespace tandem::test
