// Records of the strategies that this rank's operators were asked for, and of what ran.
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
  std::string why = {};  ///< reason if what ran does not overlap; else empty
  int64_t calls = 0;     ///< of this rank
  double speedup = 0;    ///< time of the fastest serial candidate over that of the one that ran; 0:
                         ///< they were not compared
};

/// Records the choice among candidates of `forms`, whose times are `us` (none: not compared).
/// `refusals`: why others cannot run.
void record_choice(Receipt& receipt, std::span<const Strategy> forms, std::span<const double> us,
                   size_t chosen, const std::string& refusals);
/// Lists a receipt, whose calls are counted, among those of this thread's rank.
std::shared_ptr<Receipt> list_receipt(Receipt receipt);
/// Forgets the receipts of this thread's rank, at the begin of a run.
void clear_receipts();
/// Receipts of this thread's rank, of operators that were called. Those that differ only in their
/// calls are one.
std::vector<Receipt> receipts();
/// Rows of receipts.json.
nlohmann::json to_json(const std::vector<Receipt>& receipts);

}  // namespace tandem
