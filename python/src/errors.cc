#include "errors.h"

#include <fmt/format.h>
#include <nanobind/stl/string.h>
#include <pthread.h>

#include <exception>
#include <string>

#include "core/system/printable.h"
#include "tandem/communicator.h"
#include "tandem/error.h"

namespace tandem::python {
namespace {

struct Classes {
  PyObject *error, *invalid_argument, *mismatch, *io_error, *unsupported, *timeout, *aborted,
      *device_error;
};
Classes classes;
pthread_t main_thread;
PyObject* raised_by_signal = nullptr;  // guarded by the GIL

// Runs on the main thread, where Python handles signals. An exception from a handler ends the wait
// and is raised again where the call returns to Python.
void check_signals() {
  if (!pthread_equal(pthread_self(), main_thread)) return;
  const nb::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() == 0) return;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace) PyException_SetTraceback(value, trace);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  const std::string name = Py_TYPE(value)->tp_name;
  Py_XDECREF(raised_by_signal);
  raised_by_signal = value;
  throw Interrupted(fmt::format("{} while it waited", name));
}

void raise_saved() {
  PyObject* const value = std::exchange(raised_by_signal, nullptr);
  if (!value) {
    PyErr_SetNone(PyExc_KeyboardInterrupt);
    return;
  }
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value)), value);
  Py_DECREF(value);
}

template <typename... Attributes>
void raise(PyObject* type, const std::exception& error, const Attributes&... attributes) {
  // Truncated text, or text with a file name, may be invalid UTF-8 or contain control characters.
  const std::string what = single_line(error.what());
  const nb::object text =
      nb::steal(PyUnicode_FromStringAndSize(what.data(), Py_ssize_t(what.size())));
  if (!text.is_valid()) return;
  const nb::object value = nb::steal(PyObject_CallOneArg(type, text.ptr()));
  if (!value.is_valid()) return;
  (nb::setattr(value, attributes.first, nb::cast(attributes.second)), ...);
  PyErr_SetObject(type, value.ptr());
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Timeout& e) {
    raise(classes.timeout, e, std::pair{"op", e.op}, std::pair{"rank", e.rank},
          std::pair{"peer", e.peer}, std::pair{"tile", e.tile}, std::pair{"epoch", e.epoch});
  } catch (const Aborted& e) {
    raise(classes.aborted, e, std::pair{"origin", e.origin});
  } catch (const Interrupted&) {
    raise_saved();
  } catch (const Mismatch& e) {
    raise(classes.mismatch, e);
  } catch (const InvalidArgument& e) {
    raise(classes.invalid_argument, e);
  } catch (const IoError& e) {
    raise(classes.io_error, e);
  } catch (const Unsupported& e) {
    raise(classes.unsupported, e);
  } catch (const DeviceError& e) {
    raise(classes.device_error, e);
  } catch (const Error& e) {
    raise(classes.error, e);
  }
}

}  // namespace

void bind_errors() {
  const nb::module_ errors = nb::module_::import_("tandem._errors");
  const auto find = [&](const char* name) { return nb::object(errors.attr(name)).release().ptr(); };
  classes = {find("Error"),       find("InvalidArgument"), find("Mismatch"), find("IoError"),
             find("Unsupported"), find("Timeout"),         find("Aborted"),  find("DeviceError")};
  nb::register_exception_translator(translate);
  main_thread = pthread_self();
  set_wait_check(check_signals);
}

std::string text_of(const nb::str& text) {
  const nb::object bytes =
      nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  if (!bytes.is_valid()) throw nb::python_error();
  return {PyBytes_AS_STRING(bytes.ptr()), size_t(PyBytes_GET_SIZE(bytes.ptr()))};
}

std::string type_of(nb::handle object) {
  return nb::cast<std::string>(nb::str(object.type().attr("__module__"))) + "." +
         nb::cast<std::string>(nb::str(object.type().attr("__qualname__")));
}

}  // namespace tandem::python
