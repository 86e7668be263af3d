// Saved-tensor hooks in C++, for saved tensors that need no decision. All others go to the hooks in Python.
//
// Two kinds need none:
//
// - A tensor that stays, because its storage is small or a parameter's. The hooks keep an alias and a version.
// - A tensor that the plan does not move, in a pass that C++ leads. Python asks for that (`lead`). C++ leads as long as
//   the pass does what the plan was made for. Meanwhile it alone knows which accesses came, which records are live, and
//   how many bytes those hold that do not move. Python knows where those are that move.
//
// Of the accesses of such a pass, C++ handles those for which nothing is to be done. The others go to Python, which
// tells C++ of each (`save`, `use`, `use_record`): those of records that move, and those at which the schedule has
// something to do or the cap is exceeded. The first access that was not planned ends the lead. Python takes over all
// that C++ knows (`take`), and goes on with the pass. It does the same at the end of the pass.
//
// The interpreter's lock guards what C++ knows: nothing that could run another thread or the garbage collector happens
// between looking at a fact and changing it. While Python has an access in hand, `wake` is 0. Other threads then come
// to Python, too, and wait for its lock.
//
// The rules are those of lms.torch.swapper, lms.torch.led_passes, lms.core.turns and lms.core.stepper.

#include <ATen/SequenceNumber.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/stl.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "led_pass.h"

namespace lms {
namespace {

constexpr int kOldBackwards = 64;  // OLD_BACKWARDS of lms.core.turns

// Shares the storage and the version counter, and has no history.
at::Tensor detached(const at::Tensor& tensor) {
    c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/false));
}

// Whether a change in place of one tensor counts as one of the other, too: of a view and its base, for example.
bool same_counter(const at::Tensor& one, const at::Tensor& other) {
    using Version = c10::VariableVersion;
    static_assert(sizeof(Version) == sizeof(void*), "it points to the counter, and has nothing else");
    const auto& of = torch::autograd::impl::version_counter;
    return std::memcmp(static_cast<const void*>(&of(one)), static_cast<const void*>(&of(other)), sizeof(Version)) == 0;
}

}  // namespace

class Hooks;

// Instead of the number of a record:
constexpr std::ptrdiff_t kStays = -1;  // the tensor has none
constexpr std::ptrdiff_t kTaken = -2;  // Python has taken it over, or is about to

// The Python object that autograd keeps instead of a saved tensor.
struct Saved {
    PyObject ob_base;
    Hooks* hooks;
    PyObject* owner;  // the Python object that `hooks` belongs to
    at::Tensor alias;
    std::uint32_t version;
    std::ptrdiff_t record;  // in the pass that C++ leads
    PyObject* handle;       // Python's, once it has taken the record over
};

PyTypeObject* saved_type = nullptr;  // once the module is initialised

class Hooks {
  public:
    // `example` is a plain tensor on the device. `stays` has the storages of parameters and buffers, by address.
    // `ended` is called when a pass that C++ leads is over.
    Hooks(const at::Tensor& example, std::int64_t min_size, py::dict stays, py::object ended)
        : device_(example.device()),
          keys_(example.key_set()),
          min_size_(min_size),
          thread_(PyThread_get_thread_ident()),
          stays_(std::move(stays)),
          ended_(std::move(ended)) {}

    bool open = true;                        // whether new tensors are taken
    bool leading = false;                    // a pass
    double seconds = 0;                      // spent in these hooks. The reader of one of these three sets it to zero
    std::int64_t small = 0, parameters = 0;  // bytes that were saved and stay

    // Give everything else to these hooks. `self` is the Python object around this one.
    void fall_back(const py::object& self, py::object pack, py::object unpack) {
        self_ = self.ptr();
        pack_ = std::move(pack);
        unpack_ = std::move(unpack);
    }

    // The hooks

    PyObject* pack(PyObject* object) {
        if (const at::Tensor* tensor = open ? plain(object) : nullptr) {
            const double began = now();
            PyObject* saved = keep(*tensor);
            if (saved == nullptr && leading) saved = note_save(*tensor, began, /*attended=*/false).second;
            if (saved != nullptr) {
                seconds += now() - began;
                return saved;
            }
        }
        return PyObject_CallOneArg(pack_.ptr(), object);
    }

    PyObject* unpack(PyObject* object) {
        if (Py_TYPE(object) != saved_type) return PyObject_CallOneArg(unpack_.ptr(), object);
        auto& saved = *reinterpret_cast<Saved*>(object);
        if (saved.handle != nullptr) return PyObject_CallOneArg(unpack_.ptr(), saved.handle);
        if (saved.record == kStays && good(saved)) return THPVariable_Wrap(saved.alias);
        const double began = now();
        if (PyObject* tensor = use_saved(saved, began, /*attended=*/false)) {
            seconds += now() - began;
            return tensor;
        }
        return PyObject_CallOneArg(unpack_.ptr(), object);
    }

    // The pass

    void lead(std::vector<std::int64_t> codes, std::vector<std::int64_t> cap, std::vector<std::int64_t> sizes,
              std::vector<bool> pinned, std::vector<bool> moves, bool timed) {
        led_ = Led{};
        led_.codes = std::move(codes);
        led_.cap = std::move(cap);
        led_.sizes = std::move(sizes);
        led_.pinned = std::move(pinned);
        led_.moves = std::move(moves);
        led_.timed = timed;
        led_.records.reserve(led_.sizes.size());
        led_.tasks.reserve(led_.codes.size());
        leading = true;
    }

    // The next access is Python's.
    void wake() { led_.wake = 0; }

    // Python attends the next access, which begins now.
    void attend() {
        wake();
        entered_ = now();
    }

    // What autograd is to keep if the save is the plan's next access. If the record moves, its number.
    py::object save(py::handle object) {
        const at::Tensor* tensor = leading ? plain(object) : nullptr;
        if (tensor == nullptr) return py::none();
        const auto [record, saved] = note_save(*tensor, entered_, /*attended=*/true);
        if (saved != nullptr) return py::reinterpret_steal<py::object>(saved);
        return record >= 0 ? py::object(py::int_(record)) : py::none();
    }

    // The saved tensor if its use is the plan's next access.
    py::object use(py::handle object) {
        PyObject* tensor = use_saved(*reinterpret_cast<Saved*>(object.ptr()), entered_, /*attended=*/true);
        return tensor != nullptr ? py::reinterpret_steal<py::object>(tensor) : py::none();
    }

    // Whether the use of this record, which moves, is the plan's next access.
    bool use_record(std::ptrdiff_t record) { return note_use(record, at::Tensor(), entered_, /*attended=*/true); }

    // Python has done its part of the access. It holds so many bytes, and attends each access from `wake` on.
    void leave(std::int64_t held_moving, std::size_t wake) {
        led_.held_moving = held_moving;
        led_.wake = wake;
        led_.pending = false;
        if (!led_.timed) return;
        led_.marks.back() = now();
        led_.held_after.back() = led_.held + held_moving;
    }

    // This record, which moves, is not needed any more. Python holds so many bytes now.
    void free(std::size_t index, std::int64_t held_moving) {
        forget(led_.records[index]);
        --led_.live_moving;
        led_.held_moving = held_moving;
    }

    // The end of a saved tensor of the pass.
    void end(Saved& saved) {
        const std::size_t index = saved.record;
        Record* record = &led_.records[index];
        record->saved.erase(std::find(record->saved.begin(), record->saved.end(), &saved));
        if (!record->saved.empty()) return;
        forget(*record);
        if (!led_.pinned[index]) led_.held -= led_.sizes[index];
        const auto pass = pass_;
        // If the storage dies with it, other code may run, and Python may take the pass over.
        saved.alias.reset();
        if (pass != pass_) return;
        record = &led_.records[index];
        const bool gone = record->storage.expired(), at_work = !record->handed.expired();
        record->judged = gone || !at_work;  // else the backward may still have it, or the script
        record->owned = !gone && !at_work;
        if (!led_.over()) return;
        const py::error_scope scope;  // keeps the error of the code that let go of the saved tensor
        try {
            ended_();
        } catch (py::error_already_set& error) {
            error.discard_as_unraisable("the end of a pass");
        }
    }

    // The fields of Led in native_hooks.py: all that is known of the pass, which is Python's from now on.
    py::tuple take() {
        Led led = std::exchange(led_, Led{});
        leading = false;
        ++pass_;
        // Making objects may run the collector. The references keep it from ending a saved tensor in the lists below.
        std::vector<std::pair<Record*, std::vector<py::object>>> open;
        for (std::size_t index = 0; index < led.records.size(); ++index) {
            Record& record = led.records[index];
            if (led.moves[index] || (record.freed >= 0 && record.judged)) continue;
            auto& saved = open.emplace_back(&record, std::vector<py::object>()).second;
            for (Saved* one : record.saved) {
                one->record = kTaken;
                saved.push_back(py::reinterpret_borrow<py::object>(&one->ob_base));
            }
        }
        std::vector<std::ptrdiff_t> freed;
        std::vector<bool> owned;
        for (const Record& record : led.records) {
            freed.push_back(record.freed);
            owned.push_back(record.owned);
        }
        py::list rest;
        for (const auto& [record, saved] : open) {
            const auto storage = record->storage.lock();
            const auto handed = record->handed.lock();
            rest.append(py::make_tuple(
                record - led.records.data(),
                py::make_tuple(reinterpret_cast<std::uintptr_t>(record->key.storage), record->key.version),
                storage ? py::reinterpret_steal<py::object>(THPStorage_Wrap(c10::Storage(storage))) : py::none(),
                handed ? wrap(at::Tensor(handed)) : py::none(), saved));
        }
        return py::make_tuple(led.marks, led.held_after, led.tasks, freed, owned, rest, led.last_use, led.held_peak,
                              led.pending);
    }

    std::size_t live() const { return led_.live.size() - led_.live_moving; }
    bool over() const { return leading && led_.over(); }
    bool pending() const { return led_.pending; }
    std::size_t position() const { return led_.tasks.size(); }
    std::int64_t held() const { return led_.held; }

    int traverse(visitproc visit, void* arg) const {
        for (const py::object* one : {static_cast<const py::object*>(&stays_), &ended_, &pack_, &unpack_}) {
            Py_VISIT(one->ptr());
        }
        return 0;
    }

    void clear() { ended_ = pack_ = unpack_ = {}; }

  private:
    static py::object wrap(const at::Tensor& tensor) {
        return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
    }

    // The tensor if it is no more than bytes on the device: `movable` of lms.torch.movable.
    const at::Tensor* plain(py::handle object) const {
        if (!THPVariable_CheckExact(object.ptr()) || c10::impl::TorchDispatchModeTLS::any_modes_set()) return nullptr;
        const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
        const bool is = tensor.key_set() == keys_ && tensor.device() == device_ && tensor.has_storage();
        return is ? &tensor : nullptr;
    }

    static bool good(const Saved& saved) { return saved.alias._version() == saved.version; }  // else Python raises

    // Note the save if it is the plan's next access: the record, and what autograd is to keep unless the record moves.
    std::pair<std::ptrdiff_t, PyObject*> note_save(const at::Tensor& tensor, double began, bool attended) {
        constexpr std::pair<std::ptrdiff_t, PyObject*> unplanned{-1, nullptr};
        if (led_.over()) return unplanned;
        const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
        if (!in_backward && led_.waiting == 0 && !led_.live.empty()) return unplanned;  // perhaps the next pass begins
        const at::TensorBase& base = tensor.is_view() ? tensor._base() : tensor;
        if (base.is_leaf() && base.requires_grad()) return unplanned;  // a parameter that Python has yet to note
        c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
        const Key key{storage, static_cast<std::uint32_t>(tensor._version())};
        const auto found = led_.live.find(key);
        const bool is_new = found == led_.live.end();
        const std::size_t index = is_new ? led_.records.size() : found->second;
        const auto nbytes = static_cast<std::int64_t>(storage->nbytes());
        if (is_new && (index >= led_.sizes.size() || led_.sizes[index] != nbytes)) return unplanned;
        const std::int64_t more = is_new && !led_.pinned[index] ? nbytes : 0;
        // A second save may be a write. If the record moves, Python finds out.
        const bool expected =
            led_.expects(index, kWrite, more, attended) || (!is_new && led_.expects(index, kHold, more, attended));
        if (!expected) return unplanned;

        const bool moves = led_.moves[index];
        Saved* saved = moves ? nullptr : saved_of(tensor, static_cast<std::ptrdiff_t>(index));
        if (is_new) {
            led_.records.push_back(
                {key, WeakStorage(tensor.storage().getWeakStorageImpl()), WeakTensor(at::Tensor().getIntrusivePtr())});
            led_.live.emplace(key, index);
            led_.live_moving += moves;
            if (!moves) led_.held += more;
            // Else Python sees to the peak, when it has settled what is over.
            if (!attended) led_.held_peak = std::max(led_.held_peak, led_.held + led_.held_moving);
        }
        Record& record = led_.records[index];
        if (saved != nullptr) record.saved.push_back(saved);
        led_.set_waiting(record, true);
        led_.accessed(-1, began, attended);
        return {static_cast<std::ptrdiff_t>(index), saved != nullptr ? &saved->ob_base : nullptr};
    }

    // Note the use of a saved tensor if it is the plan's next access. Returns the tensor; else a null pointer.
    PyObject* use_saved(const Saved& saved, double began, bool attended) {
        // A GPU's backward runs on threads of autograd's own. On a CPU Python warns if the script chose another one.
        const bool ours = !device_.is_cpu() || PyThread_get_thread_ident() == thread_;
        if (saved.record < 0 || !led_.expects(saved.record, kRead, 0, attended)) return nullptr;
        if (!ours || !good(saved) || c10::impl::TorchDispatchModeTLS::any_modes_set()) return nullptr;
        const at::Tensor tensor = detached(saved.alias);
        PyObject* wrapped = THPVariable_Wrap(tensor);  // may run the collector, so it comes first
        if (wrapped == nullptr) throw python_error();
        if (note_use(saved.record, tensor, began, attended)) return wrapped;
        Py_XDECREF(wrapped);
        return nullptr;
    }

    bool note_use(std::ptrdiff_t index, const at::Tensor& handed, double began, bool attended) {
        if (index < 0 || !led_.expects(index, kRead, 0, attended)) return false;
        const int task = torch::autograd::get_current_graph_task_id();
        const bool is_other = task != led_.backward;
        if (led_.backwards + is_other >= kOldBackwards) return false;  // Python forgets those that waited that long
        led_.backward = task;
        led_.backwards += is_other;
        led_.last_use = at::sequence_number::peek();
        Record& record = led_.records[index];
        record.handed = WeakTensor(handed.getIntrusivePtr());
        led_.set_waiting(record, false);
        led_.accessed(task, began, attended);
        return true;
    }

    void forget(Record& record) {
        record.freed = static_cast<std::ptrdiff_t>(led_.tasks.size());
        led_.set_waiting(record, false);
        led_.live.erase(record.key);
    }

    Saved* saved_of(const at::Tensor& tensor, std::ptrdiff_t record) {
        Saved* saved = PyObject_New(Saved, saved_type);  // the collector does not see it, and does not run for it
        if (saved == nullptr) throw std::bad_alloc();
        saved->hooks = this;
        saved->owner = Py_NewRef(self_);
        new (&saved->alias) at::Tensor(detached(tensor));
        saved->version = tensor._version();
        saved->record = record;
        saved->handle = nullptr;
        return saved;
    }

    // Returns what autograd is to keep of a tensor that stays; a null pointer if it may move.
    PyObject* keep(const at::Tensor& tensor) {
        const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
        std::int64_t* bytes = nullptr;
        if (static_cast<std::int64_t>(storage->nbytes()) < min_size_) {
            bytes = &small;
        } else if (stays_.contains(py::int_(reinterpret_cast<std::uintptr_t>(storage)))) {
            bytes = &parameters;
        } else {
            return nullptr;
        }
        *bytes += static_cast<std::int64_t>(tensor.nbytes());
        return &saved_of(tensor, kStays)->ob_base;
    }

    c10::Device device_;
    c10::DispatchKeySet keys_;  // of every plain tensor; other kinds have further keys
    std::int64_t min_size_;
    unsigned long thread_;  // that opened the session
    py::dict stays_;
    py::object ended_, pack_, unpack_;
    PyObject* self_ = nullptr;
    double entered_ = 0;  // when Python began to attend an access
    Led led_;
    std::uint64_t pass_ = 0;  // passes that Python has taken over
};

namespace {

void dealloc(PyObject* object) {
    auto* saved = reinterpret_cast<Saved*>(object);
    PyTypeObject* type = Py_TYPE(object);
    if (saved->record >= 0) saved->hooks->end(*saved);
    saved->alias.~Tensor();
    Py_XDECREF(saved->handle);
    Py_DECREF(saved->owner);
    PyObject_Free(object);
    Py_DECREF(type);
}

Saved& as_saved(PyObject* object) { return *reinterpret_cast<Saved*>(object); }

PyGetSetDef saved_fields[] = {
    {"alias", [](PyObject* saved, void*) { return THPVariable_Wrap(as_saved(saved).alias); }, nullptr, nullptr,
     nullptr},
    {"version", [](PyObject* saved, void*) { return PyLong_FromUnsignedLong(as_saved(saved).version); }, nullptr,
     nullptr, nullptr},
    {"handle",
     [](PyObject* saved, void*) {
         PyObject* handle = as_saved(saved).handle;
         return Py_NewRef(handle != nullptr ? handle : Py_None);
     },
     [](PyObject* saved, PyObject* handle, void*) {
         as_saved(saved).handle = Py_XNewRef(handle);
         as_saved(saved).alias.reset();
         return 0;
     },
     nullptr, nullptr},
    {},
};

// The hooks are plain C functions, because pybind11 would make each call slower.
Hooks& hooks_of(PyObject* self) {
    return *reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder().value_ptr<Hooks>();
}

PyObject* pack(PyObject* self, PyObject* tensor) {
    HANDLE_TH_ERRORS
    return hooks_of(self).pack(tensor);
    END_HANDLE_TH_ERRORS
}

PyObject* unpack(PyObject* self, PyObject* saved) {
    HANDLE_TH_ERRORS
    return hooks_of(self).unpack(saved);
    END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {{"pack", pack, METH_O, nullptr}, {"unpack", unpack, METH_O, nullptr}};

py::object hook(PyMethodDef* definition, const py::object& self) {
    return py::reinterpret_steal<py::object>(PyCFunction_New(definition, self.ptr()));
}

// The hooks in C++ and in Python hold each other, so the collector must see these.
void collectable(PyHeapTypeObject* heap) {
    PyTypeObject* type = &heap->ht_type;
    type->tp_flags |= Py_TPFLAGS_HAVE_GC;
    type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
        Py_VISIT(Py_TYPE(self));
        return py::detail::is_holder_constructed(self) ? py::cast<Hooks&>(py::handle(self)).traverse(visit, arg) : 0;
    };
    type->tp_clear = [](PyObject* self) {
        if (py::detail::is_holder_constructed(self)) py::cast<Hooks&>(py::handle(self)).clear();
        return 0;
    };
}

}  // namespace
}  // namespace lms

PYBIND11_MODULE(native_hooks, module) {
    using namespace lms;
    PyType_Slot slots[] = {
        {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)}, {Py_tp_getset, saved_fields}, {0, nullptr}};
    PyType_Spec spec = {"native_hooks.Saved", sizeof(Saved), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                        slots};
    saved_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
    if (saved_type == nullptr) throw py::error_already_set();
    module.def("same_counter", same_counter);
    py::class_<Hooks>(module, "Hooks", py::module_local(), py::custom_type_setup(collectable))
        .def(py::init<const at::Tensor&, std::int64_t, py::dict, py::object>())
        .def_readwrite("open", &Hooks::open)
        .def_readonly("leading", &Hooks::leading)
        .def_readwrite("seconds", &Hooks::seconds)
        .def_readwrite("small", &Hooks::small)
        .def_readwrite("parameters", &Hooks::parameters)
        .def_property_readonly("live", &Hooks::live)
        .def_property_readonly("over", &Hooks::over)
        .def_property_readonly("pending", &Hooks::pending)
        .def_property_readonly("position", &Hooks::position)
        .def_property_readonly("held", &Hooks::held)
        .def_property_readonly("pack", [](const py::object& self) { return hook(&methods[0], self); })
        .def_property_readonly("unpack", [](const py::object& self) { return hook(&methods[1], self); })
        .def("fall_back",
             [](const py::object& self, py::object pack, py::object unpack) {
                 self.cast<Hooks&>().fall_back(self, std::move(pack), std::move(unpack));
             })
        .def("lead", &Hooks::lead)
        .def("wake", &Hooks::wake)
        .def("attend", &Hooks::attend)
        .def("save", &Hooks::save)
        .def("use", &Hooks::use)
        .def("use_record", &Hooks::use_record)
        .def("leave", &Hooks::leave)
        .def("free", &Hooks::free)
        .def("take", &Hooks::take);
}
