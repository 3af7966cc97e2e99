// Diagnosis of a world's ranks, hosts and links: right bits, and speed compared with the median of
// the same kind.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "bench/machine/link_check.h"
#include "bench/machine/machine_check.h"
#include "tandem/communicator.h"

namespace tandem {

/// Fewer have no median that says which of them is slow: only bits are judged.
constexpr int kMinForMedian = 3;

struct DiagnosisRequest {
  MachineCheck machine;
  LinkCheck links;
  double factor = 2;    ///< times the median from which something counts as slow
  int fault_rank = -1;  ///< rank that makes `fault`, to be seen to be named; -1: none
  CheckFault fault = CheckFault::none;
};

struct DiagnosedRank {
  int rank = 0, host = 0;
  MachineHealth machine;
  double loopback_gbps = 0, all_to_all_gbps = 0, ring_gbps = 0;
  std::string problem;  ///< "slow: 3.1 times the median (bf16 GEMM)", "wrong bits: …"; empty: ok
};

struct DiagnosedLink {
  LinkHealth health;
  std::string problem;  ///< as in DiagnosedRank, or "unreachable"
};

struct DiagnosedHost {
  std::string name;
  std::vector<int> ranks;
  std::string problem;  ///< of all its ranks, or of each one that has any
};

struct Diagnosis {
  double factor = 0;
  std::string network;  ///< of links between hosts: "tcp"
  std::vector<DiagnosedHost> hosts;
  std::vector<DiagnosedRank> ranks;
  std::vector<DiagnosedLink> links;  ///< by receiver, then sender; without loopback

  bool is_bad() const;
};

/// Collective; every rank gets the same diagnosis. If something is slow, all is measured up to
/// twice more, and the best counts: a program that competes for a while is no defect. Throws as
/// check_links, and what check_machine throws.
Diagnosis diagnose_world(Communicator& comm, const DiagnosisRequest& request,
                         const std::function<void(const std::string&)>& progress);

/// Sets the problems of ranks, hosts and links. Speeds are compared with the median of all ranks,
/// or of the links that share memory and the others; a latency counts as slow only if it is also
/// kMinSlowUs more than the median. `hosts` has the names and ranks.
void judge(Diagnosis& diagnosis);
constexpr double kMinSlowUs = 100;

}  // namespace tandem
