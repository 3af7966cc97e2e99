#include "receipts.h"

#include <nlohmann/json.hpp>
#include <string>

#include "core/system/json.h"

namespace tandem::python {
namespace {

nb::object to_python(const nlohmann::json& value) {
  const std::string text = dump_json(value);
  return nb::module_::import_("json").attr("loads")(nb::str(text.data(), text.size()));
}

}  // namespace

nb::object to_dict(const Receipt& receipt) {
  return to_python(to_json(receipt));
}

nb::object to_list(const LayerReceipts& receipts) {
  nlohmann::json rows = nlohmann::json::array();
  for (const auto& each : receipts) rows.push_back(to_json(*each));
  return to_python(rows);
}

void bind_receipts(nb::module_& m) {
  m.def(
      "receipts", [] { return to_python(to_json(receipts())); },
      "What operators, layers of experts and context-parallel attention that this thread made "
      "were\n"
      "asked for, and what ran: a list of {\"op\", \"shape\", \"dtype\", \"group\" (ranks), "
      "\"asked\",\n"
      "\"ran\" ('overlapped' or 'serial'), \"candidate\" (its name and wire format), \"why\" (the\n"
      "reason unless it ran as asked, else ''), \"calls\", \"speedup\" (time of the fastest "
      "serial\n"
      "candidate over that of the one that ran, None if they were not compared)}, for those that\n"
      "were called, also in worlds that have ended. Rows that differ only in calls are one.");
}

}  // namespace tandem::python
