#include "engine/model/program/program.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

namespace tandem::program {

ValueId BranchProgram::add(const Value& value) {
  if (values.size() == kMaxValues) {
    throw std::logic_error(fmt::format("{}: more than {} values", name, kMaxValues));
  }
  values.push_back(value);
  return ValueId(values.size()) - 1;
}

const Op* BranchProgram::find(const OpRow& row) const {
  for (const Op& op : ops) {
    if (op.row == &row) return &op;
  }
  return nullptr;
}

bool BranchProgram::finishes_sum() const {
  return std::ranges::any_of(ops, [](const Op& op) { return op.row->finish; });
}

bool BranchProgram::saves_sum() const {
  return std::ranges::any_of(ops, [&](const Op& op) {
    return op.row->finish && std::ranges::any_of(op.out, [&](ValueId value) {
             return values[size_t(value)].life != Life::scratch;
           });
  });
}

std::string Weight::name_of(int64_t expert) const {
  const size_t star = name.find('*');
  return name.substr(0, star) + std::to_string(expert) + name.substr(star + 1);
}

Shard Features::on_rank(int tp, int rank) const {
  if (division == Division::whole) return {0, count()};
  const bool is_shared = division == Division::shared && tp > units;
  const Shard shard = is_shared ? Shard{rank * units / tp, 1} : shard_of(units, tp, rank);
  return {shard.begin * width, shard.count * width};
}

}  // namespace tandem::program
