// Records of the strategies that this rank's operators were asked for, and of what ran.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
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
