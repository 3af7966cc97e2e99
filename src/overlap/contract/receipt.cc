#include "overlap/contract/receipt.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <tuple>

namespace tandem {
namespace {

struct Receipts {
  std::vector<std::shared_ptr<Receipt>> live;
  std::vector<Receipt> ended;  ///< of operators that no longer exist
};
thread_local Receipts of_thread;

auto key_of(const Receipt& r) {
  return std::tie(r.op, r.shape, r.dtype, r.group, r.asked, r.ran, r.why, r.speedup);
}

void add(std::vector<Receipt>& rows, const Receipt& receipt) {
  if (receipt.calls == 0) return;
  const auto same = std::ranges::find_if(
      rows, [&](const Receipt& row) { return key_of(row) == key_of(receipt); });
  if (same == rows.end()) return rows.push_back(receipt);
  same->calls += receipt.calls;
}

}  // namespace

void record_choice(Receipt& receipt, std::span<const Strategy> forms, std::span<const double> us,
                   size_t chosen, const std::string& refusals) {
  Receipt& r = receipt;
  r.ran = forms[chosen];
  double serial_us = 0;
  for (size_t i = 0; i < us.size(); ++i) {
    if (forms[i] != Strategy::serial) continue;
    serial_us = serial_us > 0 ? std::min(serial_us, us[i]) : us[i];
  }
  if (serial_us > 0 && us[chosen] > 0) r.speedup = serial_us / us[chosen];
  if (r.ran == Strategy::overlapped || r.asked == Strategy::serial) return;
  const bool overlaps = std::ranges::count(forms, Strategy::overlapped) > 0;
  r.why = overlaps           ? "no overlapped candidate is faster"
          : refusals.empty() ? "no candidate overlaps"
                             : "no candidate overlaps: " + refusals;
}

std::shared_ptr<Receipt> list_receipt(Receipt receipt) {
  auto& [live, ended] = of_thread;
  std::erase_if(live, [&](const auto& each) {
    if (each.use_count() > 1) return false;
    add(ended, *each);
    return true;
  });
  return live.emplace_back(std::make_shared<Receipt>(std::move(receipt)));
}

void clear_receipts() {
  of_thread = {};
}

std::vector<Receipt> receipts() {
  std::vector<Receipt> rows = of_thread.ended;
  for (const auto& each : of_thread.live) add(rows, *each);
  return rows;
}

nlohmann::json to_json(const std::vector<Receipt>& receipts) {
  nlohmann::json rows = nlohmann::json::array();
  for (const Receipt& r : receipts) {
    nlohmann::json& row = rows.emplace_back();
    row = {{"op", r.op},       {"shape", r.shape},          {"dtype", r.dtype},
           {"group", r.group}, {"asked", name_of(r.asked)}, {"ran", name_of(r.ran)},
           {"why", r.why},     {"calls", r.calls}};
    row["speedup"] = r.speedup > 0 ? nlohmann::json(std::round(r.speedup * 1e3) / 1e3) : nullptr;
  }
  return rows;
}

}  // namespace tandem
