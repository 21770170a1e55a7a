/* Functions of this library as functions of Python. ctypes takes about 2 us for a call with ten arguments, this 0.2: a step of a
   small model has a hundred. The few entries of Python's stable interface (PEP 384) are declared here, since its headers are
   often not installed where a compiler is. */
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define MOST 12

typedef struct object object;
typedef struct {
    const char *name;
    object *(*call)(object *self, object *const *arguments, ptrdiff_t count);
    int flags;
    const char *doc;
} method;

extern void *PyLong_AsVoidPtr(object *);
extern object *PyLong_FromVoidPtr(void *);
extern object *PyLong_FromLong(long);
extern object *PyErr_Occurred(void);
extern object *PyCFunction_NewEx(method *, object *self, object *module);
extern void *PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void *);
extern void PyErr_SetString(object *, const char *);
extern object *PyExc_TypeError;
extern void Py_DecRef(object *);

/* `self` is a function's address. Arguments are integers; those that a function does not have stay unread in their registers
   and on the stack, as the calling conventions of x86-64 and AArch64 allow. */
static object *call(object *self, object *const *arguments, ptrdiff_t count)
{
    typedef int function(intptr_t, intptr_t, intptr_t, intptr_t, intptr_t, intptr_t, intptr_t, intptr_t, intptr_t, intptr_t, intptr_t,
                         intptr_t);
    intptr_t a[MOST] = {0};
    if (count > MOST) {
        PyErr_SetString(PyExc_TypeError, "a kernel takes at most 12 arguments");
        return NULL;
    }
    for (ptrdiff_t i = 0; i < count; i++)
        a[i] = (intptr_t)PyLong_AsVoidPtr(arguments[i]);
    if (PyErr_Occurred())
        return NULL;
    function *run = (function *)PyLong_AsVoidPtr(self);
    void *thread = PyEval_SaveThread();
    const int result = run(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]);
    PyEval_RestoreThread(thread);
    return PyLong_FromLong(result);
}

static method definition = {"kernel", call, 0x80 /* METH_FASTCALL */, NULL};

/* A Python function that calls the function at `address`. */
EXPORT object *torchplug_callable(void *address)
{
    object *self = PyLong_FromVoidPtr(address);
    object *made = self ? PyCFunction_NewEx(&definition, self, NULL) : NULL;
    if (self)
        Py_DecRef(self);
    return made;
}
