#include "engine/model/program/declaration.h"

namespace tandem {

std::string gradient_name(const std::string& tensor) {
  return tensor + ", gradient";
}

namespace program {

using placement::Operands;

void Declaration::forward(PlacedTensor& stream) {
  input = x = stream;
  for (const Op& op : program.ops) {
    if (op.row->declare && !op.row->finish) op.row->declare(op, *this);
  }
  stream = x;
}

void Declaration::backward(PlacedTensor& d_stream) {
  dx = d_sum = d_stream;
  for (auto op = program.ops.rbegin(); op != program.ops.rend(); ++op) {
    if (op->row->declare_backward) op->row->declare_backward(*op, *this);
  }
  d_stream = dx;
}

std::string Declaration::parameter(const Op& op, size_t i) const {
  return layer() + program.weights[op.weights[i]].name;
}

PlacedTensor Declaration::matrix(const Op& op, const std::string& tensor) const {
  Operands matrices;
  for (size_t i = 0; i < op.weights.size(); ++i) matrices.push_back(at(parameter(op, i)));
  return placement::fuse(matrices, name(tensor));
}

void Declaration::add(const Operands& tensors) {
  for (const PlacedTensor& tensor : tensors) add(tensor);
}

Operands Declaration::gradients_of(const Op& op, PlacedTensor gradient) const {
  Operands all;
  for (size_t i = 0; i < op.weights.size(); ++i) {
    gradient.name = gradient_name(parameter(op, i));
    all.push_back(gradient);
  }
  return all;
}

Operands Declaration::summed(const PlacedTensor& term, const std::string& parameter) const {
  return {term, placement::all_reduce(term, kTp, gradient_name(parameter))};
}

PlacedTensor Declaration::constant(const char* tensor, Placement over_tp) const {
  PlacedTensor constant{tensor, "constant"};
  constant.over(Axis::tp) = over_tp;
  constant.over(Axis::pp) = Placement::on_rank(pp_rank_);
  return constant;
}

}  // namespace program
}  // namespace tandem
