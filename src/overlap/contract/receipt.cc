#include "overlap/contract/receipt.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>

#include "core/system/env.h"
#include "overlap/contract/layer_receipts.h"
#include "tandem/error.h"
#include "tune/margin.h"

namespace tandem {
namespace {

struct Receipts {
  std::vector<std::shared_ptr<Receipt>> live;
  std::vector<Receipt> ended;  ///< of operators that no longer exist
};
thread_local Receipts of_thread;
thread_local LayerReceipts* collected = nullptr;

auto key_of(const Receipt& r) {
  return std::tie(r.op, r.shape, r.dtype, r.group, r.asked, r.ran, r.candidate, r.why, r.speedup);
}

void add(std::vector<Receipt>& rows, const Receipt& receipt) {
  if (receipt.calls == 0) return;
  const auto same = std::ranges::find_if(
      rows, [&](const Receipt& row) { return key_of(row) == key_of(receipt); });
  if (same == rows.end()) return rows.push_back(receipt);
  same->calls += receipt.calls;
}

/// Time of the fastest candidate of a form; 0 if there is none.
double fastest_us(std::span<const NamedForm> candidates, std::span<const double> us,
                  Strategy form) {
  double best = 0;
  for (size_t i = 0; i < us.size(); ++i) {
    if (candidates[i].form == form) best = best > 0 ? std::min(best, us[i]) : us[i];
  }
  return best;
}

/// Reason that the serial `chosen` runs.
std::string reason(std::span<const NamedForm> candidates, std::span<const double> us, size_t chosen,
                   const std::string& refusals) {
  if (std::ranges::count(candidates, Strategy::overlapped, &NamedForm::form) == 0) {
    return "no candidate overlaps" + (refusals.empty() ? "" : ": " + refusals);
  }
  if (us.empty()) {
    return env().tune ? "candidates are not compared"
                      : "no times are known, and TANDEM_TUNE=0 measures none";
  }
  return fmt::format("no overlapped candidate is {:g} % faster: {:.1f} us, serial {:.1f} us",
                     kOverSerial.over_first * 100, fastest_us(candidates, us, Strategy::overlapped),
                     us[chosen]);
}

}  // namespace

void record_choice(Receipt& receipt, std::span<const NamedForm> candidates,
                   std::span<const double> us, size_t chosen, const std::string& refusals) {
  Receipt& r = receipt;
  r.ran = r.group == 1 ? Strategy::serial : candidates[chosen].form;
  r.candidate = candidates[chosen].name;
  const double serial_us = fastest_us(candidates, us, Strategy::serial);
  if (serial_us > 0 && us[chosen] > 0) r.speedup = serial_us / us[chosen];
  if (r.ran_as_asked()) return;
  r.why = r.group == 1 ? "a group of 1 rank has nothing to overlap"
                       : reason(candidates, us, chosen, refusals);
}

std::string describe(const Receipt& r, const char* runs) {
  return fmt::format("{}: {}, {} rank{}: {} {} as {}: {}", r.op, r.shape, r.group,
                     r.group == 1 ? "" : "s", name_of(r.asked), runs, name_of(r.ran), r.why);
}

std::string strictness(bool strict) {
  return strict || env().strict ? " strict" : "";
}

void require_as_asked(const Receipt& receipt, bool strict) {
  if (receipt.ran_as_asked() || !(strict || env().strict)) return;
  throw Unsupported(fmt::format("{}: expected overlapped, as {} requests",
                                describe(receipt, "would run"),
                                strict ? "strict" : "TANDEM_STRICT=1"));
}

std::shared_ptr<Receipt> list_receipt(Receipt receipt) {
  auto& [live, ended] = of_thread;
  std::erase_if(live, [&](const auto& each) {
    if (each.use_count() > 1) return false;
    add(ended, *each);
    return true;
  });
  live.push_back(std::make_shared<Receipt>(std::move(receipt)));
  if (collected) collected->push_back(live.back());
  return live.back();
}

LayerReceipts collect_receipts(const std::function<void()>& make) {
  LayerReceipts listed;
  struct Collecting {
    explicit Collecting(LayerReceipts& to) : before(std::exchange(collected, &to)) {}
    ~Collecting() { collected = before; }
    LayerReceipts* before;
  } const collecting(listed);
  make();
  return listed;
}

void clear_receipts() {
  of_thread = {};
}

std::vector<Receipt> receipts() {
  std::vector<Receipt> rows = of_thread.ended;
  for (const auto& each : of_thread.live) add(rows, *each);
  return rows;
}

nlohmann::json to_json(const Receipt& r) {
  nlohmann::json row = {{"op", r.op},
                        {"shape", r.shape},
                        {"dtype", r.dtype},
                        {"group", r.group},
                        {"asked", name_of(r.asked)},
                        {"ran", name_of(r.ran)},
                        {"candidate", r.candidate},
                        {"why", r.why},
                        {"calls", r.calls}};
  row["speedup"] = r.speedup > 0 ? nlohmann::json(std::round(r.speedup * 1e3) / 1e3) : nullptr;
  return row;
}

nlohmann::json to_json(const std::vector<Receipt>& receipts) {
  nlohmann::json rows = nlohmann::json::array();
  for (const Receipt& each : receipts) rows.push_back(to_json(each));
  return rows;
}

}  // namespace tandem
