// Records of the strategies that this rank's operators were asked for, and of what ran. An operator
// that was asked for `automatic` or `overlapped` was asked to overlap: one that runs serial, also
// because that is faster, does not run as asked. One that was asked for `serial` does.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

#include "tandem/strategy.h"

namespace tandem {

struct Receipt {
  std::string op = {}, shape = {}, dtype = {};
  int group = 1;  ///< ranks
  Strategy asked = Strategy::automatic, ran = Strategy::serial;
  std::string candidate = {};  ///< name of the one that ran, with its wire format
  std::string why = {};        ///< reason if it did not run as asked; else empty
  int64_t calls = 0;           ///< of this rank
  double speedup = 0;  ///< time of the fastest serial candidate over that of the one that ran; 0:
                       ///< they were not compared

  bool ran_as_asked() const { return ran == Strategy::overlapped || asked == Strategy::serial; }
};

struct NamedForm {
  std::string name;
  Strategy form = Strategy::serial;
};

/// Records the choice among `candidates`, whose times are `us` (none: not compared). `refusals`:
/// why others cannot run. In a group of one rank nothing overlaps, whatever runs.
void record_choice(Receipt& receipt, std::span<const NamedForm> candidates,
                   std::span<const double> us, size_t chosen, const std::string& refusals);
/// Throws Unsupported, which says why, unless the operator runs as asked; if `strict`, or with
/// TANDEM_STRICT=1. Ranks choose alike, so all of them throw.
void require_as_asked(const Receipt& receipt, bool strict);
/// " strict" or "": ranks must agree on it.
std::string strictness(bool strict);

/// Lists a receipt, whose calls are counted, among those of this thread's rank.
std::shared_ptr<Receipt> list_receipt(Receipt receipt);
/// Forgets the receipts of this thread's rank, at the begin of a run.
void clear_receipts();
/// Receipts of this thread's rank, of operators that were called. Those that differ only in their
/// calls are one.
std::vector<Receipt> receipts();
/// "ag_gemm: m 64 n 6 k 4 f32, 2 ranks: automatic would run as serial: no overlapped …", for one
/// that does not run as asked. `runs`: "ran" or "would run".
std::string describe(const Receipt& receipt, const char* runs);
/// Row of receipts.json.
nlohmann::json to_json(const Receipt& receipt);
nlohmann::json to_json(const std::vector<Receipt>& receipts);

}  // namespace tandem
