// Ranks as processes without MPI, each with a communicator that meets the others at the store.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "comm/rendezvous/launch.h"
#include "comm/rendezvous/secret.h"
#include "tandem/communicator.h"

namespace tandem::test {

// Exit status of a rank's process; the last two mean that the error names the last rank.
enum Status {
  kRight = 0,
  kWrong = 1,
  kRefused = 10,  // InvalidArgument
  kMismatch = 11,
  kTimeoutNamesIt = 20,
  kAbortedNamesIt = 21
};

/// Rendezvous address of a world of `size`: a local socket, or a free TCP port.
Launch make_launch(int size, bool one_host);
/// Secret of the ranks of `launch`.
control::Secret secret_of(const Launch& launch);

/// Starts a process for each of the `present` ranks, in order.
std::vector<pid_t> start(Launch launch, const std::vector<int>& present, double deadline_s,
                         const std::function<int(Communicator&)>& body);
/// Waits for all; returns their statuses, -signal for those killed.
std::vector<int> finish(const std::vector<pid_t>& children);

std::vector<int> all_ranks(int size);

}  // namespace tandem::test
